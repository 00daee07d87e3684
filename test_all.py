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


def follow(tokens, N, D, K):
    """Return the right answers (N, D*K) to one sequence of tokens (T, K or more): follow each query
    through the pairs by comparing symbols."""
    symbols = [tuple(token[:K].tolist()) for token in tokens]
    pairs, current = symbols[:-N], symbols[-N:]
    follows = dict(zip(pairs[::2], pairs[1::2], strict=True))
    answers = []
    for _ in range(D):
        current = [follows[symbol] for symbol in current]
        answers.append(torch.tensor(current))
    return torch.cat(answers, -1)


def angles_by_hand(size):
    """Return (12, size/2): the position times 10000^(-2i/size)."""
    return torch.tensor([[t / 1e4 ** (2 * i / size) for i in range(size // 2)] for t in range(12)])


def rotated(x, angles):
    """RoPE as a product of complex numbers."""
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(12, 4), angles)
    return torch.cat([turned.real, turned.imag], -1)


def small(layers, **more):
    """A model of 12 tokens of 6 numbers, the last 2 queries, with 2 heads of 8 numbers."""
    torch.manual_seed(0)
    sizes = dict(T=12, N=2, inputs=6, outputs=5, heads=2, width=16, head_size=8, qk_std=1)
    return Transformer(layers=layers, **sizes, **more)


def planted(x, heads):
    """A model of two layers with one head each that solves N=4, D=1 by a circuit that was set by
    hand: in layer 0 each token notes the token before it, and in layer 1 it reads the tokens whose
    note is its own symbol."""
    symbols, T = x[..., :4], x.shape[1]

    # layer 0: token t attends to t - 1, the first one to itself; what it reads is its note
    before = torch.eye(T)[(torch.arange(T) - 1).clamp(min=0)].expand(len(x), T, T)
    noted = heads.get((0, 0), torch.matmul)(before, symbols)

    # layer 1: it attends to earlier tokens whose note is its own symbol, but for the first token,
    # which has noted itself
    scores = -50 * torch.cdist(symbols, noted).square()
    scores += torch.full((T, T), -torch.inf).triu(1)
    scores[:, 1:, 0] = -torch.inf
    read = heads.get((1, 0), torch.matmul)(scores.softmax(-1), symbols)
    return read[:, -4:]


planted.heads = [(0, 0), (1, 0)]


class Stages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """A folder for all, and a run of TINY, whose flags, log and weights no test changes."""
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.tiny = cls.folder / "tiny"
        assert run_main(train, f"{TINY} --out {cls.tiny}")[0] == 0

    def test_data_has_the_targets_that_following_the_pairs_finds(self):
        for N, D, K in (4, 3, 4), (2, 1, 2), (7, 5, 4), (1, 2, 2):
            batch = data.Task(N, D, K, seed=1).draw("training", 20)
            for tokens, targets in zip(batch.inputs, batch.answers, strict=True):
                assert torch.equal(targets, follow(tokens, N, D, K))

    def test_data_draws_a_batch_again_and_no_two_alike(self):
        found = set()
        for seed, split, number in itertools.product((0, 1), data.SPLITS, (0, 1)):
            batch, again = (data.Task(seed=seed).draw(split, 5, number) for _ in range(2))
            assert all(map(torch.equal, batch, again))
            found.add(tuple(batch.inputs.flatten().tolist()))
        assert len(found) == 4 * len(data.SPLITS)

    def test_model_layers_are_pytorchs_own_attention_and_mlp(self):
        for causal, positions in itertools.product((True, False), ("appended", "rope", None)):
            model = small(1, causal=causal, positions=positions)
            x, block = torch.randn(3, 12, 6), model.blocks[0]
            numbers = angles_by_hand(6) if positions == "appended" else torch.zeros(12, 0)
            appended = torch.cat([numbers.cos(), numbers.sin()], 1).expand(3, -1, -1)
            stream = model.embed(torch.cat([x, appended], 2))
            q, k, v = block.qkv(block.ln1(stream)).chunk(3, -1)
            # (B, heads, T, size)
            q, k, v = (x.view(3, 12, 2, 8).transpose(1, 2) for x in (q, k, v))
            if positions == "rope":
                q, k = rotated(q, angles_by_hand(8)), rotated(k, angles_by_hand(8))
            written = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            stream = stream + block.out(written.transpose(1, 2).flatten(2))
            stream = stream + block.down(F.gelu(block.up(block.ln2(stream))))
            expected = model.head(model.ln(stream))[:, -2:]
            torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)

    def test_model_heads_can_be_read_and_replaced(self):
        model, x = small(3), torch.randn(3, 12, 6)

        def same(pattern, values):
            torch.testing.assert_close(pattern.sum(-1), torch.ones(3, 12))
            return pattern @ values

        def silent(pattern, values):
            return 0 * values

        for head in model.heads:
            torch.testing.assert_close(model(x, heads={head: same}), model(x))
            assert not torch.allclose(model(x, heads={head: silent}), model(x))
        with self.assertRaisesRegex(ValueError, "no head"):
            model(x, heads={(0, 2): silent})

    def test_train_learns_one_retrieval_step(self):
        flags = "--layers 2 --width 32 --D 1 --N 2 --positions rope --no-mlp --lr 1e-2 --batch 64"
        flags += " --warmup 10 --steps 2000 --stop-below 0.2 --device cpu"
        code, out, err = run_main(train, f"{flags} --out {self.folder}/learned")
        assert code == 0 and "solved: True" in out, out + err

        # other sequences, with answers that are found by comparing symbols; their average has 0.5
        model, _, _ = train.load(self.folder / "learned")
        batch = data.Task(N=2, D=1, seed=99).draw("validation", 500)
        answers = torch.stack([follow(tokens, 2, 1, 4) for tokens in batch.inputs])
        assert (model(batch.inputs) - answers).square().mean() < 0.22

    def test_train_resumes_a_stopped_run_to_the_same_bits(self):
        run = self.folder / "stopped"
        with mock.patch.object(train, "print_row", side_effect=[None, None, KeyboardInterrupt]):
            code, _, err = run_main(train, f"{TINY} --out {run}")  # Ctrl-C, which comes at step 20
        assert code == 1 and "--resume goes on from step 20" in err
        assert not (run / "model.pt").exists()
        code, out, err = run_main(train, f"{TINY} --out {run} --resume")
        assert code == 0 and "resumed" in out, err
        for row, other in zip(train.read_log(self.tiny), train.read_log(run), strict=True):
            assert {**row, "seconds": 0} == {**other, "seconds": 0}
        weights = train.load(run)[0].state_dict()
        for name, weight in train.load(self.tiny)[0].state_dict().items():
            assert torch.equal(weight, weights[name]), name

    def test_ablate_finds_a_planted_circuit_and_its_neighbours_are_not_faithful(self):
        task = data.Task(N=4, D=1)
        report = ablate.find_circuit(planted, task)
        paths = {*ablate.paths_in(report)}
        assert sorted(map(str, paths)) == ["L0H0: 1b reads 1a", "L1H0: q reads 1b"]
        assert report["verdict"] == "validated under both ablations"

        # without a path, or with another in its place
        patched = ablate.PatchedModel(planted, task, task.draw("circuits", 64))
        for path in paths:
            for wrong in set(), {path._replace(layer=1 - path.layer)}:
                assert patched.keep_only(paths - {path} | wrong).mean() > 0.05

        # without any, it answers what the corrupted sequences ask
        answered = task.losses(planted(patched.corrupted.inputs, {}), patched.clean)
        torch.testing.assert_close(patched.keep_only([], ablate.RESAMPLE), answered)

    def test_analyze_draws_every_figure(self):
        assert "run python ablate.py" in run_main(analyze, str(self.tiny))[1]
        edges = (0, 0, "1b+1", "1b"), (1, 0, "q", "1b+1"), (1, 1, "q", "1a*")
        paths = itertools.starmap(ablate.Path, edges)
        rows = [dict(path._asdict(), attention=0.5, without=dict(x_1=0.7)) for path in paths]
        report = dict(validated=True, verdict="validated", ablation="mean", mean=dict(x_1=0.5))
        report.update(sequences=9, paths=rows)
        train.write_file(self.tiny / "circuit.json", report)
        code, _, err = run_main(analyze, str(self.tiny))
        assert code == 0, err
        assert train.read_file(self.tiny / "emergence.json")["steps"] == [0, 20, 40]
        for name in "curves", "attention_maps", "circuit", "emergence", "paths":
            assert (self.tiny / f"{name}.png").exists()

    def test_sweep_trains_its_grid_and_draws_figure_4(self):
        folder = self.folder / "sweep"
        grid = f"{TINY} --steps 10 --layers 1 2 --workers 2 --out {folder}"
        code, out, err = run_main(sweep, grid)
        assert code == 0, out + err
        rows = train.read_file(folder / "results.jsonl")
        assert [row["layers"] for row in rows] == [1, 2]
        assert all(row["ended"] == 10 and row["x_1"] > 0 for row in rows)
        assert (folder / "figure4.png").exists()

        # nothing is trained twice, and of a run that is gone the row is left
        assert "0 of 2 runs to do" in run_main(sweep, grid)[1]
        (folder / rows[0]["run"]).rename(self.folder / "elsewhere")
        assert "0 of 0 runs to do" in run_main(sweep, f"--out {folder}")[1]
        assert train.read_file(folder / "results.jsonl") == rows

    def test_a_mistake_gets_one_line(self):
        for module, arguments, says in (
            (train, "--K 3", "not even"),
            (train, "--targets 4", "among 1 to 3"),
            (train, "--task nowhere:Task", "nowhere"),
            (train, "--init nowhere", "No such file"),
            (train, "--device nowhere", "nowhere"),
            (train, "--lay 3", "unrecognized"),
            (train, "--lr -1", "from 0 to"),
            (train, "--stop-below 2", "below chance"),
            (train, f"{TINY} --out {self.tiny}", "add --resume"),
            (ablate, "nowhere", "no run directory"),
            (analyze, "", "required: run"),
            (sweep, "nowhere", "sweep.py: unrecognized"),
            (sweep, "--layers 1 --worker 3", "sweep.py: unrecognized"),
        ):
            code, _, err = run_main(module, arguments)
            assert code == 2 and says in err and err.count("\n") == 1, (module, arguments, err)


if __name__ == "__main__":
    unittest.main()
