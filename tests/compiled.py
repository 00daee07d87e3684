"""The retrieval problem in RASP, compiled by Tracr of DeepMind (Lindner et al. 2023): transformers
whose circuit others have built, to see whether ablate.py finds it.

Tracr is no package of ours: `pip install --no-deps tracr-pypi` and `pip install networkx absl-py`.
"""
# ruff: noqa: E402  (a package must be replaced before it is imported)

import sys
import types
from pathlib import Path

import networkx
import torch
import tracr


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

from data import chain


ONE, BOS = BasisDirection("one"), BasisDirection("tokens", "bos")  # the names that Tracr gives


# ---- the programs


def program(N, D, doubling):
    """[S-Op of x_1, ..., x_D], what each query holds in the end, as a RASP program.

    In the first layer each b token of a pair reads its a token. Then every token that holds x_k as
    its last symbol reads the b token whose a is x_k: a linear chain takes the b token's symbol and
    needs D + 1 layers; pointer doubling takes all that the b token holds and needs
    floor(log2 D) + 2."""

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
    """Compile the S-Ops `outputs` together into a causal craft model of Tracr, for sequences of T
    tokens out of `symbols` different ones.

    This is tracr.compiler.compile_rasp_to_model for more than one output and without JAX."""
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
    """A transformer with the weights that Tracr gives it: no MLPs, no layer norm. It is called as
    ablate.find_circuit calls a model.

    Its vocabulary is the numbers of a sequence's symbols, as number_symbols gives them. Each x_k
    that it predicts is the sum of all symbols, weighted by the residual stream of the query.

    Tracr puts a BOS token before the sequence, and a token that selects no other attends to it. It
    brings the value 0, so the patterns leave it out: their rows sum to at most 1."""

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
                query = project(space, qk.left_space).matrix @ qk.matrix
                key = project(space, qk.right_space).matrix
                value = project(space, ov.input_space).matrix @ ov.matrix
                output = project(ov.output_space, space).matrix
                self.query.data[layer, number, :, : query.shape[1]] = torch.tensor(query)
                self.key.data[layer, number, :, : key.shape[1]] = torch.tensor(key)
                self.value.data[layer, number] = torch.tensor(value)
                self.output.data[layer, number] = torch.tensor(output)

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
