"""Smoke tests: each stage once, small, against something independent of it.

python test_all.py             # these, in seconds
python test_all.py -k model    # those of a stage; further flags are those of unittest
python -m pytest tests         # all others
"""

import contextlib
import io
import itertools
import pathlib
import shlex
import shutil
import sys
import tempfile
import unittest
from unittest import mock

import ablate
import analyze
import data
import sweep
import train
from model import Transformer

import torch
import torch.nn.functional as F


TINY = "--layers 2 --heads 2 --width 16 --D 1 --N 2 --batch 8 --steps 40 --eval-every 10"
TINY = f"{TINY} --stop-below 0 --warmup 5 --save-every 20 --device cpu"
LEARNS = "--layers 2 --width 32 --D 1 --N 2 --positions rope --no-mlp --lr 1e-2 --batch 64"
LEARNS = f"{LEARNS} --warmup 10 --steps 2000 --stop-below 0.2 --device cpu"
torch.set_num_threads(1)  # more only wait on tensors this small


def run_main(module, arguments):
    """Run a command line in this process; return (exit code, stdout, stderr)."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = [pathlib.Path(module.__file__).name, *shlex.split(arguments)]
    redirected = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with mock.patch.object(sys, "argv", argv), redirected[0], redirected[1]:
        try:
            module.main()
        except SystemExit as stop:
            code = stop.code
    if isinstance(code, str):  # Python prints it, and exits with 1
        code, err = 1, io.StringIO(f"{code}\n")
    return code, out.getvalue(), err.getvalue()


def follow(tokens, N, D):
    """The right answers (N, D*K) to one sequence of tokens (T, K): follow each query through the
    pairs by comparing symbols."""
    symbols = [tuple(token) for token in tokens.tolist()]
    pairs, current = symbols[:-N], symbols[-N:]
    follows = dict(zip(pairs[::2], pairs[1::2], strict=True))
    answers = []
    for _ in range(D):
        current = [follows[symbol] for symbol in current]
        answers.append(torch.tensor(current))
    return torch.cat(answers, -1)


def angles_by_hand(size):
    """(12, size/2): the position times 10000^(-2i/size)."""
    return torch.tensor([[t / 1e4 ** (2 * i / size) for i in range(size // 2)] for t in range(12)])


def rotated(x):
    """RoPE of x (..., 12, size) as a product of complex numbers."""
    angles = angles_by_hand(x.shape[-1])
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def planted(x, heads):
    """A model of two layers with one head each that solves N=4, D=1 by a circuit that was set by
    hand: in layer 0 each token notes the token before it, and in layer 1 it reads the earlier
    token whose note is its own symbol."""
    symbols, T = x[..., :4], x.shape[1]
    before = torch.ones(T - 1).diag(-1).expand(len(x), T, T)
    noted = heads.get((0, 0), torch.matmul)(before, symbols)
    scores = -500 * torch.cdist(symbols, noted).square() + torch.full((T, T), -torch.inf).triu(1)
    return heads.get((1, 0), torch.matmul)(scores.softmax(-1), symbols)[:, -4:]


planted.heads = [(0, 0), (1, 0)]


class Stages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """A folder for all, and in it a trained run, whose model no test changes."""
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.trained = cls.folder / "trained"
        code, out, err = run_main(train, f"{LEARNS} --out {cls.trained}")
        assert code == 0 and "solved: True" in out, out + err

    def test_data_has_the_targets_that_following_the_pairs_finds(self):
        for N, D, K in (4, 3, 4), (2, 1, 2), (7, 5, 4), (1, 2, 2):
            batch = data.Task(N, D, K, seed=1).draw("training", 20)
            for tokens, targets in zip(batch.inputs, batch.answers, strict=True):
                assert torch.equal(targets, follow(tokens, N, D))

    def test_data_draws_a_batch_again_and_no_two_alike(self):
        found = set()
        for seed, split, number in itertools.product((0, 1), data.SPLITS, (0, 1)):
            batch, again = (data.Task(seed=seed).draw(split, 5, number) for _ in range(2))
            assert all(map(torch.equal, batch, again))
            found.add(tuple(batch.inputs.flatten().tolist()))
        assert len(found) == 4 * len(data.SPLITS)

    def test_model_is_pytorchs_own_attention_and_mlp_also_without_a_head(self):
        for causal, positions in itertools.product((True, False), ("appended", "rope", None)):
            # 12 tokens of 6 numbers, the last 2 queries; two layers with two heads of 8 numbers
            how = dict(causal=causal, positions=positions, qk_std=1)
            model, x = Transformer(12, 2, 6, 5, 2, 2, 16, 8, **how), torch.randn(3, 12, 6)
            numbers = angles_by_hand(6) if positions == "appended" else torch.zeros(12, 0)
            appended = torch.cat([numbers.cos(), numbers.sin()], 1).expand(3, -1, -1)
            stream = model.embed(torch.cat([x, appended], 2))
            for block in model.blocks:
                q, k, v = block.qkv(block.ln1(stream)).chunk(3, -1)
                q, k, v = (x.view(3, 12, 2, 8).transpose(1, 2) for x in (q, k, v))
                if positions == "rope":
                    q, k = rotated(q), rotated(k)
                written = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                if block is model.blocks[0]:
                    written[:, 1] = 0
                stream = stream + block.out(written.transpose(1, 2).flatten(2))
                stream = stream + block.down(F.gelu(block.up(block.ln2(stream))))
            expected = model.head(model.ln(stream))[:, -2:]
            found = model(x, heads={(0, 1): lambda pattern, values: 0 * values})
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    def test_train_has_learned_what_comparing_symbols_finds(self):
        model, _, _ = train.load(self.trained)
        batch = data.Task(N=2, D=1, seed=99).draw("validation", 500)
        answers = torch.stack([follow(tokens, 2, 1) for tokens in batch.inputs])
        assert (model(batch.inputs) - answers).square().mean() < 0.22  # their average has 0.5

    def test_ablate_finds_a_planted_circuit(self):
        task = data.Task(N=4, D=1)
        report = ablate.find_circuit(planted, task)
        assert [*map(str, ablate.paths_in(report))] == ["L0H0: 1b reads 1a", "L1H0: q reads 1b"]
        assert report["verdict"] == "validated under both ablations"

        # without any path, the model answers what the corrupted sequences ask
        patched = ablate.PatchedModel(planted, task, task.draw("circuits", 64))
        answered = task.losses(planted(patched.corrupted.inputs, {}), patched.clean)
        torch.testing.assert_close(patched.keep_only([], ablate.RESAMPLE), answered)

    def test_analyze_draws_every_figure(self):
        assert "run python ablate.py" in run_main(analyze, str(self.trained))[1]
        report = ablate.find_circuit(planted, data.Task(N=4, D=1))
        train.write_file(self.trained / "circuit.json", report)
        code, _, err = run_main(analyze, str(self.trained))
        assert code == 0, err
        for name in "curves", "attention_maps", "circuit", "emergence", "paths":
            assert (self.trained / f"{name}.png").exists()

    def test_sweep_trains_its_grid_once_and_draws_figure_4(self):
        folder = self.folder / "sweep"
        grid = f"{TINY} --steps 10 --layers 1 2 --workers 2 --out {folder}"
        code, out, err = run_main(sweep, grid)
        assert code == 0, out + err
        rows = train.read_file(folder / "results.jsonl")
        assert [(row["layers"], row["ended"]) for row in rows] == [(1, 10), (2, 10)]
        assert (folder / "figure4.png").exists()
        assert "0 of 2 runs to do" in run_main(sweep, grid)[1]

    def test_a_mistake_gets_one_line(self):
        for module, arguments, says in (
            (train, "--K 3", "not even"),
            (train, "--targets 4", "among 1 to 3"),
            (train, "--task nowhere:Task", "nowhere"),
            (train, f"--init {self.trained}", "another shape"),
            (train, f"{LEARNS} --heads 2 --init {self.trained}", "another shape"),
            (train, "--lay 3", "unrecognized"),
            (train, "--stop-below 2", "below chance"),
            (train, f"{LEARNS} --out {self.trained}", "add --resume"),
            (ablate, "nowhere", "no run directory"),
            (sweep, "--layers 1 --worker 3", "sweep.py: unrecognized"),
        ):
            code, _, err = run_main(module, arguments)
            assert code == 2 and says in err and err.count("\n") == 1, (module, arguments, err)


if __name__ == "__main__":
    unittest.main()
