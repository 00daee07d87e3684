"""The retrieval problem in RASP, compiled by Tracr of DeepMind (Lindner et al. 2023): transformers
whose circuit others have built. ablate.find_circuit finds the paths that their programs say alone,
but in much noise. results/circuits.md is made of what results/figures/compiled.jsonl says of this.

    pip install --no-deps tracr-pypi; pip install networkx absl-py
"""
# ruff: noqa: E402  (a package must be replaced before it is imported)

import pathlib
import sys
import types

import pytest
import torch


networkx = pytest.importorskip("networkx", reason="this file says how to install Tracr")
tracr = pytest.importorskip("tracr", reason="this file says how to install Tracr")

# the package itself imports JAX and Haiku, which the modules below do not need
compiler = types.ModuleType("tracr.compiler")
compiler.__path__ = [str(pathlib.Path(tracr.__file__).parent / "compiler")]
sys.modules.setdefault("tracr.compiler", compiler)

import ablate
import train
from data import Task
from tests.common import HERE
from tests.planted import heads_of, paths_from

from tracr.compiler.basis_inference import infer_bases
from tracr.compiler.craft_graph_to_model import craft_graph_to_model
from tracr.compiler.expr_to_craft_graph import add_craft_components_to_rasp_graph
from tracr.compiler.rasp_to_graph import extract_rasp_graph
from tracr.craft.bases import BasisDirection
from tracr.craft.vectorspace_fns import project
from tracr.rasp import rasp


N = 4
ONE, BOS = BasisDirection("one"), BasisDirection("tokens", "bos")  # the names that Tracr gives


def program(D, doubling):
    """[S-Op of x_1, ..., x_D], what each query holds in the end, as a RASP program. First each b
    token reads its a token; then every token whose last symbol is x_k reads the b token whose a is
    x_k. A linear chain takes its symbol, pointer doubling all that it holds."""

    def is_before(key, query):
        return key == query - 1 and query % 2 == 1 and query < 2 * N * D

    def is_same(key, query):
        return key is not None and key == query  # the interpreter's None: nothing was selected

    selector = rasp.Select(rasp.indices, rasp.indices, is_before)
    previous = rasp.Aggregate(selector, rasp.tokens).named("previous")
    held = [rasp.tokens]  # held[j]: the symbol j steps further on in the chain
    while len(held) <= D:
        selector = rasp.Select(previous, held[-1], is_same)
        taken = held[: D + 1 - len(held)] if doubling else held[:1]
        for symbol in taken:
            held.append(rasp.Aggregate(selector, symbol).named(f"x_{len(held)}"))
    return held[1:]


class Compiled(torch.nn.Module):
    """A transformer with the weights that Tracr gives it: no MLPs, no layer norm. Its vocabulary is
    the numbers of a sequence's symbols; each x_k that it predicts is the sum of all symbols,
    weighted by the residual stream of the query. A token that selects no other attends to Tracr's
    BOS token. That brings the value 0, so patterns leave it out: their rows sum to at most 1."""

    def __init__(self, D, doubling):
        super().__init__()
        symbols, T, outputs = N * (D + 1), Task(N, D).T, program(D, doubling)

        # as tracr.compiler.compile_rasp_to_model, for more than one output and without JAX
        extracted = [extract_rasp_graph(output) for output in outputs]
        graph = networkx.compose_all([output.graph for output in extracted])
        for output in outputs:
            infer_bases(graph, graph.nodes[output.label], set(range(symbols)), T)
        add_craft_components_to_rasp_graph(graph, bos_dir=BOS, one_dir=ONE, causal=True)
        craft = craft_graph_to_model(graph, extracted[-1].sources)
        blocks = [list(block.heads()) for block in craft.blocks]
        layers, heads = self.shape = len(blocks), max(map(len, blocks))
        self.heads = heads_of(layers, heads)

        # the residual stream has a dimension for each value of each S-Op
        space = craft.residual_space
        basis = torch.eye(space.num_dims)

        def dimensions(name, size):
            return [space.index_by_direction[BasisDirection(name, value)] for value in range(size)]

        def inside(matrix, left, right):
            matrix = project(space, left).matrix @ matrix @ project(right, space).matrix
            return torch.tensor(matrix)

        one, bos = basis[space.index_by_direction[ONE]], basis[space.index_by_direction[BOS]]
        self.token_embedding = torch.nn.Parameter(basis[dimensions("tokens", symbols)] + one)
        self.position_embedding = torch.nn.Parameter(basis[dimensions("indices", T)])
        self.bos = torch.nn.Parameter(bos + one)
        self.read_out = [dimensions(output.label, symbols) for output in outputs]

        # the heads; where a layer has fewer than others, the weights stay zero
        zeros = torch.zeros(2, layers, heads, *basis.shape)
        self.qk, self.ov = map(torch.nn.Parameter, zeros)
        for layer, block in enumerate(blocks):
            for number, head in enumerate(block):
                qk, ov = head.w_qk, head.w_ov
                self.qk.data[layer, number] = inside(qk.matrix, qk.left_space, qk.right_space)
                self.ov.data[layer, number] = inside(ov.matrix, ov.input_space, ov.output_space)

    def forward(self, x, heads=()):
        # the symbols (B, symbols, 4) of each sequence by their size, and the number of each token's
        pairs = [sequence.unique(dim=0, return_inverse=True) for sequence in x[..., :4]]
        symbols, numbers = map(torch.stack, zip(*pairs, strict=True))
        residual = self.token_embedding[numbers] + self.position_embedding  # (B, T, width)
        B, T, _ = residual.shape
        later, functions = torch.ones(T, 1 + T, dtype=torch.bool).triu(2), dict(heads)
        for layer in range(self.shape[0]):
            # attention to the BOS token, which comes first, and to all tokens; then to these alone
            read = torch.cat([self.bos.expand(B, 1, -1), residual], 1)[:, None]
            scores = residual[:, None] @ self.qk[layer] @ read.mT  # (B, heads, T, 1 + T)
            pattern = scores.masked_fill(later, -torch.inf).softmax(-1)[..., 1:]
            values = residual[:, None] @ self.ov[layer]  # (B, heads, T, width)
            for head in range(self.shape[1]):
                write = functions.get((layer, head), torch.matmul)
                residual = residual + write(pattern[:, head], values[:, head])
        weights = residual[:, -N:, self.read_out]  # (B, N, D, symbols)
        return (weights @ symbols[:, None]).flatten(2)


def paths_of(D, doubling):
    """The paths of a program."""
    paths = [f"0 {k}b {k}a" for k in range(1, D + 1)] + ["1 q 1b"]
    if doubling:  # D = 3
        return {*paths_from(*paths, "1 2b 3b", "2 q 2b", "2.1 q 2b")}
    return {*paths_from(*paths, *(f"{k} q {k}b" for k in range(2, D + 1)))}


NOISE = 0.1  # one of those in the table
ROWS = train.read_file(HERE / "results/figures/compiled.jsonl")
ROWS = [row for row in ROWS if row["noise"] == NOISE]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["program"])
def test_the_search_says_of_a_program_what_its_row_says(row):
    """With noise on each weight matrix, in units of its standard deviation."""
    name, D = row["program"].split(", D=")
    case = int(D), name == "doubling"
    model, generator = Compiled(*case), torch.Generator().manual_seed(0)
    for weights in model.parameters():
        noise = torch.randn(weights.shape, generator=generator)
        weights.data += NOISE * weights.std() * noise
    report, truth = ablate.find_circuit(model, Task(N, int(D))), paths_of(*case)
    assert row["shape"] == "{} x {}".format(*model.shape) and row["paths"] == len(truth)
    assert row["exact"] == ({*ablate.paths_in(report)} == truth)
    assert report["validated"] == row["verdict"].startswith("validated"), report["verdict"]
