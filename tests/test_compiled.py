"""The retrieval problem in RASP, compiled by Tracr of DeepMind (Lindner et al. 2023): transformers
whose circuit others have built. They solve the problem along the paths that their programs say, and
ablate.find_circuit finds these paths and no others.

    pip install --no-deps tracr-pypi; pip install networkx absl-py
"""
# ruff: noqa: E402  (a package must be replaced before it is imported)

import copy
import functools
import itertools
import sys
import types
from pathlib import Path

import pytest
import torch


networkx = pytest.importorskip("networkx", reason="this file says how to install Tracr")
tracr = pytest.importorskip("tracr", reason="this file says how to install Tracr")

# the package itself imports JAX and Haiku, which the modules below do not need
compiler = types.ModuleType("tracr.compiler")
compiler.__path__ = [str(Path(tracr.__file__).parent / "compiler")]
sys.modules.setdefault("tracr.compiler", compiler)

from tracr.compiler.basis_inference import infer_bases
from tracr.compiler.craft_graph_to_model import craft_graph_to_model
from tracr.compiler.expr_to_craft_graph import add_craft_components_to_rasp_graph
from tracr.compiler.rasp_to_graph import extract_rasp_graph
from tracr.craft.bases import BasisDirection
from tracr.craft.vectorspace_fns import project
from tracr.rasp import rasp

import ablate
from data import chain, held_out, make_batch, partial_losses
from tests.planted import settings


ONE, BOS = BasisDirection("one"), BasisDirection("tokens", "bos")  # the names that Tracr gives


# ---- the programs


def program(N, D, doubling):
    """[S-Op of x_1, ..., x_D], what each query holds in the end, as a RASP program. First each b
    token reads its a token; then every token whose last symbol is x_k reads the b token whose a is
    x_k. A linear chain takes its symbol and needs D + 1 layers; pointer doubling takes all that it
    holds and needs floor(log2 D) + 2."""

    def is_before(key, query):
        return key == query - 1 and query % 2 == 1 and query < 2 * N * D

    def is_same(key, query):
        return key is not None and key == query  # the interpreter's None: nothing was selected

    selector = rasp.Select(rasp.indices, rasp.indices, is_before)
    previous = rasp.Aggregate(selector, rasp.tokens).named("previous")

    # held[j]: the symbol j steps further on in the chain
    held = [rasp.tokens]
    while len(held) <= D:
        selector = rasp.Select(previous, held[-1], is_same)
        taken = held[: D + 1 - len(held)] if doubling else held[:1]
        for symbol in taken:
            held.append(rasp.Aggregate(selector, symbol).named(f"x_{len(held)}"))
    return held[1:]


# ---- the compiled transformer


def compile_program(outputs, symbols, T):
    """Compile S-Ops together into a causal craft model of Tracr, for T tokens out of `symbols`: as
    tracr.compiler.compile_rasp_to_model, for more than one output and without JAX."""
    extracted = [extract_rasp_graph(output) for output in outputs]
    graph = networkx.compose_all([program.graph for program in extracted])
    for output in outputs:
        infer_bases(graph, graph.nodes[output.label], set(range(symbols)), T)
    add_craft_components_to_rasp_graph(graph, bos_dir=BOS, one_dir=ONE, causal=True)
    return craft_graph_to_model(graph, extracted[-1].sources)


def number_symbols(tokens, count):
    """tokens (B, T, K) -> the number of each token's symbol (B, T), from 0 to count - 1 by the size
    of its first coordinate, and the symbol of each number (B, count, K)."""
    same = (tokens[:, :, None] == tokens[:, None]).all(-1)
    is_first = same.int().argmax(-1) == torch.arange(tokens.shape[1])
    smaller = tokens[:, None, :, 0] < tokens[:, :, None, 0]
    numbers = (smaller & is_first[:, None]).sum(-1)
    symbols = tokens.new_zeros(len(tokens), count, tokens.shape[-1])
    symbols.scatter_(1, numbers[..., None].expand_as(tokens), tokens)
    return numbers, symbols


class Compiled(torch.nn.Module):
    """A transformer with the weights that Tracr gives it: no MLPs, no layer norm. Its vocabulary is
    the numbers of a sequence's symbols; each x_k that it predicts is the sum of all symbols,
    weighted by the residual stream of the query. A token that selects no other attends to Tracr's
    BOS token. That brings the value 0, so patterns leave it out: their rows sum to at most 1."""

    def __init__(self, D, doubling, N=4, K=4):
        super().__init__()
        self.task, self.K, self.symbols = chain(N, D), K, N * (D + 1)
        outputs = program(N, D, doubling)
        craft = compile_program(outputs, self.symbols, self.task.T)
        blocks = [list(block.heads()) for block in craft.blocks]
        self.layers, self.heads = shape = len(blocks), max(map(len, blocks))

        # the residual stream has a dimension for each value of each S-Op
        space = craft.residual_space
        basis = torch.eye(space.num_dims)

        def dimensions(name, size):
            return [space.index_by_direction[BasisDirection(name, value)] for value in range(size)]

        one, bos = basis[space.index_by_direction[ONE]], basis[space.index_by_direction[BOS]]
        self.token_embedding = torch.nn.Parameter(basis[dimensions("tokens", self.symbols)] + one)
        self.position_embedding = torch.nn.Parameter(basis[dimensions("indices", self.task.T)])
        self.bos = torch.nn.Parameter(bos + one)
        self.read_out = [dimensions(output.label, self.symbols) for output in outputs]

        # the heads; where a layer has fewer than others, the weights stay zero
        width, size = len(basis), max(len(head.w_qk.matrix.T) for heads in blocks for head in heads)
        self.query = torch.nn.Parameter(torch.zeros(*shape, width, size))
        self.key = torch.nn.Parameter(torch.zeros(*shape, width, size))
        self.value = torch.nn.Parameter(torch.zeros(*shape, width, self.symbols))
        self.output = torch.nn.Parameter(torch.zeros(*shape, self.symbols, width))
        for layer, heads in enumerate(blocks):
            for number, head in enumerate(heads):
                qk, ov = head.w_qk, head.w_ov
                for parameter, matrix in (
                    (self.query, project(space, qk.left_space).matrix @ qk.matrix),
                    (self.key, project(space, qk.right_space).matrix),
                    (self.value, project(space, ov.input_space).matrix @ ov.matrix),
                    (self.output, project(ov.output_space, space).matrix),
                ):
                    parameter.data[layer, number, :, : matrix.shape[1]] = torch.tensor(matrix)

    def forward(self, x, heads=None, return_patterns=False):
        B, T, _ = x.shape
        numbers, symbols = number_symbols(x[..., : self.K], self.symbols)
        residual = self.token_embedding[numbers] + self.position_embedding  # (B, T, width)
        later = torch.ones(T, 1 + T, dtype=torch.bool).triu(2)
        patterns = []
        for layer in range(self.layers):
            # attention to the BOS token, which comes first, and to all tokens; then to these alone
            read = torch.cat([self.bos.expand(B, 1, -1), residual], 1)
            queries = residual[:, None] @ self.query[layer]  # (B, heads, T, size)
            keys = read[:, None] @ self.key[layer]  # (B, heads, 1 + T, size)
            scores = (queries @ keys.mT).masked_fill(later, -torch.inf)
            pattern = scores.softmax(-1)[..., 1:]  # (B, heads, T, T)
            patterns.append(pattern)

            # what each head writes
            values = residual[:, None] @ self.value[layer]  # (B, heads, T, symbols)
            for head in range(self.heads):
                write = (heads or {}).get((layer, head), torch.matmul)
                written = write(pattern[:, head], values[:, head])
                residual = residual + written @ self.output[layer, head]

        weights = residual[:, -self.task.N :, self.read_out]  # (B, N, D, symbols)
        predictions = (weights @ symbols[:, None]).flatten(2)
        return (predictions, patterns) if return_patterns else predictions


# ---- what they compute, and what is found


compiled = functools.cache(Compiled)
CASES = [(1, False), (2, False), (3, False), (4, False), (3, True)]  # D, doubling


def paths_of(D, doubling):
    """The paths of a program: {(layer, head, reader, read)}."""
    paths = {(0, 0, f"{k}b", f"{k}a") for k in range(1, D + 1)} | {(1, 0, "q", "1b")}
    if doubling:  # D = 3
        return paths | {(1, 0, "2b", "3b"), (2, 0, "q", "2b"), (2, 1, "q", "2b")}
    return paths | {(k, 0, "q", f"{k}b") for k in range(2, D + 1)}


def measure(model, heads=None):
    """The loss of each symbol (D,) on 64 held-out sequences, the patterns, and the Batch."""
    batch = make_batch(0, held_out("search", 64), model.task.N, model.task.symbols - 1)
    with torch.no_grad():
        predictions, patterns = model(batch.inputs, heads=heads, return_patterns=True)
    return partial_losses(predictions, batch.targets, model.K).mean(0), patterns, batch


@pytest.mark.parametrize("case", CASES)
def test_solves_the_problem_along_its_paths(case):
    model = compiled(*case)
    loss, patterns, batch = measure(model)
    assert loss.max() < 0.01
    assert not any(pattern.triu(1).any() for pattern in patterns)
    sequence, names = torch.arange(64)[:, None], model.task.names
    for layer, head, reader, read in paths_of(*case):
        rows, columns = (batch.positions[:, :, names.index(role)] for role in (reader, read))
        assert patterns[layer][sequence, head, rows, columns].min() > 0.99

    # without attention in a head that has paths, and in no other, a symbol is lost
    for head in itertools.product(range(model.layers), range(model.heads)):
        lost = measure(model, {head: lambda pattern, values: 0 * pattern @ values})[0]
        assert (lost.max() > 0.5) == (head in {path[:2] for path in paths_of(*case)})


def test_doubling_solves_seven_steps_in_four_layers():
    model = compiled(7, True)
    assert model.layers == 4 and measure(model)[0].max() < 0.01


# noise of 0.1: with 0.2 the loss of the model itself is 0.12
SLOW = [*((case, 0) for case in CASES[2:]), ((3, False), 0.1), ((3, True), 0.1)]
SLOW = [pytest.param(*search, marks=pytest.mark.slow) for search in SLOW]


@pytest.mark.parametrize("case, noise", [(CASES[0], 0), (CASES[1], 0), *SLOW])
def test_find_circuit_finds_the_compiled_paths(case, noise):
    """Also with Gaussian noise, in units of the standard deviation of each weight matrix."""
    model, generator = copy.deepcopy(compiled(*case)), torch.Generator().manual_seed(0)
    for weights in model.parameters():
        weights.data += noise * weights.std() * torch.randn(weights.shape, generator=generator)
    report = ablate.find_circuit(model, settings(case[0], model.layers, model.heads))
    assert report["validated"], report["verdict"]
    names = "layer", "head", "reader", "read"
    assert {tuple(row[name] for name in names) for row in report["paths"]} == paths_of(*case)
