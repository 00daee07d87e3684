"""Every stage against something independent: brute force, PyTorch's own op, or a planted answer.

    python test_all.py              # about 3 minutes on 2 cores; ends with "N passed, N failed"
    python test_all.py rotary law   # only the tests whose names contain one of these words
"""
import contextlib
import http.server
import io
import itertools
import json
import math
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it: on tensors this small more threads only wait
import psutil
import torch
import torch.nn.functional as F
from dask.utils import key_split
from distributed import Client

import ablate
import analyze
import data
import llm
import sweep
import train
from model import Transformer, rotate

HERE = Path(__file__).parent
TINY = "--layers 2 --heads 2 --width 16 --D 1 --N 2 --batch 8 --steps 40 --eval-every 10 --warmup 5 --device cpu".split()


def run_main(module, *arguments):
    """(exit code, stdout, stderr) of a command line, run in this process: importing torch anew takes seconds."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), \
            mock.patch.object(sys, "argv", [module.__name__ + ".py", *map(str, arguments)]):
        try:
            module.main()
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def start(script, *arguments):
    """The command line as a process of its own, for tests that kill it."""
    return subprocess.Popen([sys.executable, HERE / script, *map(str, arguments)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited too long"
        time.sleep(0.01)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def assert_refused(module, *arguments, says):
    """One clear line, exit code 2."""
    code, out, err = run_main(module, *arguments)
    assert code == 2, (arguments, code, err)
    assert err.count("\n") == 1 and says in err and "Traceback" not in err, err


def weights_equal(run_a, run_b):
    a, b = (train.read_tensors(Path(run) / "model.pt") for run in (run_a, run_b))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def tiny_model(layers=3, heads=2, width=16, T=12, N=2, causal=True, mlp=True, qk=False, head_size=8):
    torch.manual_seed(0)
    model = Transformer(T, N, 6, 5, layers, heads, width, head_size, mlp, causal,
                        data.rotary_angles(T, head_size) if qk else None)
    for p in model.parameters():  # biases and gains away from 0 and 1, patterns away from uniform
        p.data += 0.3 * torch.randn_like(p)
    return model, torch.randn(4, T, 6)


# ---- data.py

def test_random_bits_are_splitmix64():
    def reference_mix(x):  # Steele, Lea and Flood (2014), in Python's own whole numbers
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2 ** 64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2 ** 64
        return x ^ x >> 31
    golden = 0x9E3779B97F4A7C15
    for seed, index in (0, 0), (7, 123456789), (3, -5):
        stream = reference_mix(reference_mix((seed + golden) % 2 ** 64) ^ index * golden % 2 ** 64)
        expected = [reference_mix((stream + (i + 1) * golden) % 2 ** 64) for i in range(9)]
        assert [b % 2 ** 64 for b in data.random_bits(seed, torch.tensor([index]), 9)[0].tolist()] == expected


def test_targets_are_what_following_the_chain_gives():
    for N, D, K in itertools.product((1, 2, 4, 5), (1, 2, 3, 6), (2, 4)):
        index = torch.arange(20)
        batch = data.make_batch(3, index, N, D, K)
        last = data.make_batch(3, index, N, D, K, ic=False, rotary="qk")
        assert batch.inputs.shape == (20, N * (2 * D + 1), 2 * K) and last.inputs.shape == (20, N * (2 * D + 1), K)
        for i in index:
            solved = data.solve(batch.inputs[i], N, D, K)
            assert torch.equal(solved, batch.targets[i]) and torch.equal(solved[:, -K:], last.targets[i])


def test_positions_are_where_the_roles_stand():
    N, D, K = 4, 3, 4
    batch = data.make_batch(0, torch.arange(50), N, D, K)
    assert data.roles(D) == ["q", "1a", "1b", "2a", "2b", "3a", "3b"]
    assert torch.equal(batch.positions.flatten(1).sort(1).values, torch.arange(28).expand(50, 28))
    for b, n in itertools.product(range(50), range(N)):
        place = batch.positions[b, n].tolist()
        held = batch.inputs[b, place, :K]
        assert place[0] >= 2 * N * D                                     # the queries come last
        for k in range(1, D + 1):
            a, b_ = place[2 * k - 1], place[2 * k]
            assert b_ == a + 1 and a // (2 * N) == D - k                  # adjacent, deepest step first
            assert torch.equal(held[2 * k - 1], held[2 * k - 2])          # ka repeats x_{k-1}
            assert torch.equal(batch.targets[b, place[0] - 2 * N * D].view(D, K)[k - 1], held[2 * k])


def test_symbols_are_distinct_standard_normal_numbers():
    extremes = data.standard_normal(torch.tensor([-1, 0, 2 ** 63 - 1, -2 ** 63]))
    assert extremes.isfinite().all() and 5 < extremes.max() == -extremes.min() < 6
    batch = data.make_batch(1, torch.arange(4000), rotary="qk")
    held = torch.cat([batch.inputs[b][batch.positions[b, :, [0, 2, 4, 6]].flatten()] for b in range(4000)])
    numbers = held.flatten().double().sort().values
    assert abs(numbers.mean()) < 0.01 and abs(numbers.var() - 1) < 0.01
    cdf = 0.5 * (1 + (numbers / math.sqrt(2)).erf())
    distance = (cdf - (torch.arange(len(numbers)) + 0.5) / len(numbers)).abs().max()
    assert distance * math.sqrt(len(numbers)) < 1.95                      # Kolmogorov-Smirnov, p = 0.001
    assert len(held.unique(dim=0)) == len(held)
    assert (torch.corrcoef(held.T) - torch.eye(4)).abs().max() < 0.02


def test_shuffles_are_uniform_and_independent():
    N, D, B = 3, 2, 12000
    slot = data.make_batch(5, torch.arange(B), N, D).positions[:, :, [1, 3, 0]]  # steps 1 and 2, queries
    order = slot.argsort(1)                                                       # (B, N, 3) who stands where
    code = (order * torch.tensor([9, 3, 1])[:, None]).sum(1)                      # a permutation as one number
    joint = torch.stack([c.unique(return_inverse=True)[1] for c in code.T], 1)     # (B, 3) in 0..5
    for columns in ([0], [1], [2], [0, 1], [0, 2], [1, 2]):
        cell = sum(joint[:, c] * 6 ** i for i, c in enumerate(columns))
        counts, expected = cell.bincount(minlength=6 ** len(columns)).double(), B / 6 ** len(columns)
        chi2, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
        assert abs(chi2 - freedom) < 4.5 * math.sqrt(2 * freedom), (columns, chi2)


def test_batches_are_a_pure_function_of_seed_and_index():
    whole = data.make_batch(2, torch.arange(100))
    alone = data.make_batch(2, torch.tensor([71, 3]))
    assert all(torch.equal(a, w[[71, 3]]) for a, w in zip(alone, whole))
    assert not torch.equal(whole.inputs, data.make_batch(3, torch.arange(100)).inputs)


def test_every_example_comes_once_per_epoch():
    steps = [data.batch_index(0, step, 16, 40) for step in range(5)]              # 80 examples, 2 epochs
    first, second = torch.cat(steps).split(40)
    assert torch.equal(first.sort().values, torch.arange(40)) and torch.equal(second.sort().values, torch.arange(40))
    assert not torch.equal(first, second)
    assert torch.equal(data.batch_index(0, 3, 16, 0), torch.arange(48, 64))
    assert data.validation_index(8).max() < 0


def test_depth_laws_against_the_simulation():
    for D in range(1, 65):
        assert data.simulated_depth(D, causal=False) == data.unmasked_depth(D) == math.ceil(math.log(4 * D + 1, 3) - 1e-9)
        assert data.simulated_depth(D, causal=True) == data.causal_depth(D) == math.floor(math.log2(D)) + 2
        assert data.paper_bound(D) == math.ceil(math.log(2 * D, 3) - 1e-9) <= data.unmasked_depth(D)


def test_minimal_circuits_reach_what_the_laws_allow():
    """In every depth all symbols that it allows and no more, only along tokens that the mask lets be seen."""
    for D, layers, causal in itertools.product((1, 2, 3, 5, 8, 17), range(1, 6), (True, False)):
        circuit = data.minimal_circuit(D, layers, causal)
        depth = data.causal_depth if causal else data.unmasked_depth
        reached = ablate.symbols_reached(ablate.paths_of(circuit), D, layers).tolist()
        assert reached == [depth(k) <= layers for k in range(1, D + 1)], (D, layers, causal)
        assert all(data.may_attend(D, causal)[path] for _, path in ablate.paths_of(circuit))
        assert len(circuit) == layers * (1 if causal else 2)


def test_one_hot_attention_is_where_the_roles_stand():
    batch = data.make_batch(0, torch.arange(8))
    pattern = data.one_hot([(0, 2), (4, 3)], batch.positions)
    for b, n in itertools.product(range(8), range(4)):
        place = batch.positions[b, n].tolist()
        assert pattern[b, place[0], place[2]] == 1 and pattern[b, place[4], place[3]] == 1
    assert pattern.sum() == 2 * 4 * 8


def test_depth_laws_against_sets_on_a_real_sequence():
    """The assumptions of Section 5 spelled out token by token, with all chains and the real order of tokens."""
    for D, causal in itertools.product((1, 2, 3, 4, 5, 8), (True, False)):
        N, positions = 2, data.make_batch(D, torch.arange(1), 2, D, 2).positions[0].tolist()
        known = {}
        for n, place in enumerate(positions):
            for i, token in enumerate(place):
                known[token] = {("symbol", n, i // 2), ("pair", n, (i + 1) // 2)}
        layers = 0
        while ("symbol", 0, D) not in known[positions[0][0]]:
            known = {token: set.union(*(other for at, other in known.items()
                                        if other & mine and (at <= token or not causal)))
                     for token, mine in known.items()}
            layers += 1
        assert layers == data.simulated_depth(D, causal), (D, causal)


# ---- model.py

def test_model_equals_pytorchs_own_encoder():
    for causal in (True, False):
        model, x = tiny_model(causal=causal)
        mask = torch.full((12, 12), -math.inf).triu(1) if causal else None
        h = model.embed(x)
        for block in model.blocks:
            layer = torch.nn.TransformerEncoderLayer(16, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True)
            layer.load_state_dict({
                "self_attn.in_proj_weight": block.qkv.weight, "self_attn.in_proj_bias": block.qkv.bias,
                "self_attn.out_proj.weight": block.out.weight, "self_attn.out_proj.bias": block.out.bias,
                "linear1.weight": block.up.weight, "linear1.bias": block.up.bias,
                "linear2.weight": block.down.weight, "linear2.bias": block.down.bias,
                "norm1.weight": block.ln1.weight, "norm1.bias": block.ln1.bias,
                "norm2.weight": block.ln2.weight, "norm2.bias": block.ln2.bias})
            h = layer(h, src_mask=mask)
        torch.testing.assert_close(model(x), model.head(model.ln(h))[:, -2:], atol=1e-5, rtol=1e-5)


def test_pattern_path_equals_fast_path():
    for causal, mlp, qk, heads in itertools.product((True, False), (True, False), (True, False), (1, 3)):
        model, x = tiny_model(heads=heads, causal=causal, mlp=mlp, qk=qk)
        predictions, patterns = model(x, return_patterns=True)
        torch.testing.assert_close(model(x), predictions, atol=1e-5, rtol=1e-5)
        assert len(patterns) == 3 and all(pattern.shape == (4, heads, 12, 12) for pattern in patterns)
        own = {(layer, head): patterns[layer][:, head] for layer in range(3) for head in range(heads)}
        torch.testing.assert_close(model(x, patterns=own), predictions, atol=1e-5, rtol=1e-5)
        for pattern in patterns:
            torch.testing.assert_close(pattern.sum(-1), torch.ones(4, heads, 12))


def test_replaced_patterns_are_used():
    model, x = tiny_model(heads=2)
    planted = torch.zeros(12, 12)
    planted[:, 0] = 1
    _, patterns = model(x, patterns={(1, 0): planted}, return_patterns=True)
    assert torch.equal(patterns[1][:, 0], planted.expand(4, 12, 12))
    assert not torch.equal(patterns[1][:, 1], patterns[1][:, 0])
    for nowhere in (3, 0), (0, 2), (-1, 0):
        try:
            model(x, patterns={nowhere: planted})
            assert False, f"a pattern for head {nowhere} was ignored"
        except ValueError as error:
            assert "there is no head" in str(error)
    # by hand, for one layer and head: everybody takes the value of token 0
    model, x = tiny_model(layers=1, heads=1, mlp=False, head_size=16)
    block, h = model.blocks[0], model.embed(x)
    value = block.qkv(block.ln1(h))[:, :, -16:]
    expected = model.head(model.ln(h + block.out(value[:, :1].expand(4, 12, 16))))[:, -2:]
    torch.testing.assert_close(model(x, patterns={(0, 0): planted}), expected, atol=1e-5, rtol=1e-5)


def test_a_future_token_has_no_effect_at_all():
    for qk in (False, True):
        model, x = tiny_model(qk=qk)
        _, before = model(x, return_patterns=True)
        assert all((pattern.triu(1) == 0).all() for pattern in before)
        for t in (3, 11):
            changed = x.clone()
            changed[:, t] += 100
            _, after = model(changed, return_patterns=True)
            assert all(torch.equal(a[:, :, :t], b[:, :, :t]) for a, b in zip(after, before))
            assert not torch.equal(after[0][:, :, t], before[0][:, :, t])
        assert torch.equal(model(changed)[:, 0], model(x)[:, 0])          # token 11 is the second query, not the first
        assert not torch.equal(model(changed)[:, 1], model(x)[:, 1])


def test_rotary_scores_depend_on_distance_alone():
    angles = data.rotary_angles(20, 8)
    q, k = torch.randn(2, 1, 8)
    scores = rotate(q.expand(20, 8), angles) @ rotate(k.expand(20, 8), angles).T  # (20, 20)
    for distance in range(-19, 20):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(scores.diagonal(0)[0], scores.diagonal(1)[0])
    # and in the whole model: no prediction changes when all tokens move on by 5, but without rotation they do
    model, x = tiny_model(qk=True)
    before, model.angles = model(x), data.rotary_angles(17, 8)[5:]
    torch.testing.assert_close(model(x), before, atol=1e-4, rtol=1e-4)
    model.angles = torch.zeros(12, 4)
    assert (model(x) - before).abs().max() > 0.01
    # against complex multiplication, as in Su et al. (2023)
    turned = torch.view_as_complex(torch.stack(q.expand(20, 8).chunk(2, -1), -1).contiguous())
    turned = turned * torch.polar(torch.ones(20, 4), angles)
    torch.testing.assert_close(rotate(q.expand(20, 8), angles), torch.cat([turned.real, turned.imag], -1))
    # appended to the input: 4 numbers per token, frequencies 1 and 0.01
    appended = data.make_batch(0, torch.arange(1)).inputs[0, :, 4:]
    expected = [[math.cos(t), math.cos(0.01 * t), math.sin(t), math.sin(0.01 * t)] for t in range(28)]
    torch.testing.assert_close(appended, torch.tensor(expected), atol=1e-5, rtol=1e-5)


# ---- train.py

def test_partial_losses_and_crossings():
    predictions, targets = torch.randn(2, 5, 4, 12)
    by_hand = [sum((predictions[..., 4 * k + i] - targets[..., 4 * k + i]).square().mean() for i in range(4)) / 4
               for k in range(3)]
    torch.testing.assert_close(train.partial_losses(predictions, targets, 4).mean(0), torch.stack(by_hand))
    assert train.first_below([0, 10, 20, 30], [1.0, 0.6, 0.4, 0.6]) == 15
    assert train.first_below([0, 10], [1.0, 0.6]) is None


def test_learning_rate_rises_stays_and_falls():
    flags = train.parse_flags(["--steps", "100", "--warmup", "10", "--decay", "0.5", "--lr", "1"])
    rates = [train.learning_rate(step, flags) for step in range(101)]
    assert rates[0] == 0.1 and rates[9:50] == [1] * 41 and abs(rates[75] - 0.5) < 1e-9 and rates[100] == 0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)


def test_muon_is_pytorchs_muon():
    torch.manual_seed(0)
    ours = [torch.randn(shape, requires_grad=True) for shape in ((24, 8), (8, 24), (8, 8), (24, 8))]
    theirs = [matrix.detach().clone().requires_grad_() for matrix in ours]
    both = [train.Muon(ours, weight_decay=0.1, dtype=torch.bfloat16),
            torch.optim.Muon(theirs, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")]
    for optimizer in both:
        for group in optimizer.param_groups:
            group["lr"] = 0.1
    before = [matrix.detach().clone() for matrix in ours]
    for _ in range(3):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in both:
            optimizer.step()
    for a, b, start in zip(ours, theirs, before):
        assert (a - b).norm() < 0.01 * (a - start).norm(), (a.shape, (a - b).norm(), (a - start).norm())
    # and what it is an approximation of
    update = torch.randn(3, 8, 24)
    u, _, vh = torch.linalg.svd(update, full_matrices=False)
    assert (train.orthogonalize(update) - u @ vh).norm() < 0.25 * (u @ vh).norm()
    assert torch.equal(train.orthogonalize(update.mT), train.orthogonalize(update).mT)


def test_optimizers_train_every_parameter_once():
    for flags in ["--optimizer", "adamw"], []:
        flags = train.parse_flags([*TINY, *flags])
        model = train.build(flags)
        trained = [p for optimizer in train.optimizers(model, flags) for group in optimizer.param_groups
                   for p in group["params"]]
        assert sorted(map(id, trained)) == sorted(map(id, model.parameters()))


def test_training_learns_one_retrieval_step():
    with tempfile.TemporaryDirectory() as folder:
        code, out, err = run_main(train, *"--layers 2 --heads 2 --width 32 --D 1 --N 2 --rotary qk --lr 3e-3 --batch 64 "
                                  "--steps 2000 --target 0.05 --device cpu --out".split(), folder + "/run")
        assert code == 0 and "solved: True" in out, out + err
        assert sorted(p.name for p in Path(folder, "run").iterdir()) == \
            ["config.json", "curves.png", "log.jsonl", "model.pt", "state.pt"]
        # measured again on other sequences, following the chains instead of trusting the targets
        model, config = train.load(Path(folder, "run"))
        batch = data.make_batch(99, torch.arange(500), N=2, D=1, rotary="qk")
        solved = torch.stack([data.solve(tokens, 2, 1, 4) for tokens in batch.inputs])
        assert (model(batch.inputs) - solved).square().mean() < 0.06


def test_held_circuits_learn_what_the_depth_allows():
    """Two layers held at a circuit learn x_1, which one layer cannot."""
    with tempfile.TemporaryDirectory() as folder:
        for layers, learned in ((1, False), (2, True)):
            run = Path(folder, str(layers))
            code, out, err = run_main(train, *f"--layers {layers} --heads 1 --width 32 --D 2 --N 2 --batch 64 --steps 150 "
                                      "--lr 0.003 --target 0 --circuit --device cpu --out".split(), run)
            assert code == 0, err
            last = train.read_log(run)[-1]
            assert (last["x_1"] < 0.25) == learned and last["x_2"] > 0.4, last
    assert_refused(train, "--circuit", "--heads", 8, says="--circuit takes --heads 1")


def test_same_seed_twice_is_bitwise_equal():
    with tempfile.TemporaryDirectory() as folder:
        for name, seed in ("a", 0), ("b", 0), ("c", 1):
            assert run_main(train, *TINY, "--seed", seed, "--out", f"{folder}/{name}")[0] == 0
        assert weights_equal(f"{folder}/a", f"{folder}/b") and not weights_equal(f"{folder}/a", f"{folder}/c")


def test_killed_and_resumed_ends_bitwise_as_uninterrupted():
    with tempfile.TemporaryDirectory() as folder:
        flags = [*TINY, "--examples", 100, "--steps", 400, "--target", 0]
        for name, blow, code in (("killed", signal.SIGKILL, -9), ("terminated", signal.SIGTERM, 143),
                                 ("interrupted", signal.SIGINT, 130)):
            run = Path(folder, name)
            process = start("train.py", *flags, "--out", run)
            wait_for(lambda: (run / "log.jsonl").exists() and len(train.read_log(run)) > 10)
            process.send_signal(blow)
            out, err = process.communicate(timeout=100)
            assert process.returncode == code, err
            assert not (run / "model.pt").exists() and train.read_log(run)[-1]["step"] < 400
            assert blow == signal.SIGKILL or "--resume" in out.splitlines()[-1]
            code, out, err = run_main(train, *flags, "--out", run, "--resume")
            assert code == 0 and "resumed" in out, err
            assert "holds this run already" in run_main(train, *flags, "--out", run)[2]
        assert run_main(train, *flags, "--out", Path(folder, "whole"))[0] == 0
        rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in train.read_log(Path(folder, name))]
                for name in ("killed", "terminated", "interrupted", "whole")]
        assert len(rows[3]) == 41 and rows[0] == rows[1] == rows[2] == rows[3]
        for name in "killed", "terminated", "interrupted":
            assert weights_equal(f"{folder}/{name}", f"{folder}/whole")


def test_a_stack_of_seeds_equals_its_solo_runs():
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for optimizer in "muon", "adamw":
            flags = [*TINY, "--optimizer", optimizer, "--save-every", 20, "--target", 0.7, "--dtype", "float32"]
            assert run_main(train, *flags, "--seed", 3, "--seeds", 3)[0] == 0
            for seed in 3, 4, 5:
                run = train.run_directory(train.parse_flags([*map(str, flags), "--seed", str(seed)]))
                assert run_main(train, *flags, "--seed", seed, "--out", f"solo{optimizer}{seed}")[0] == 0
                for weights in "ckpt/000020.pt", "model.pt":
                    stacked, solo = (train.load(path, weights)[0] for path in (run, f"solo{optimizer}{seed}"))
                    for a, b in zip(stacked.parameters(), solo.parameters(), strict=True):
                        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
                for a, b in zip(train.read_log(run), train.read_log(f"solo{optimizer}{seed}"), strict=True):
                    assert abs(a["val"] - b["val"]) < 1e-5 and a["step"] == b["step"]


def test_a_stack_never_overwrites_a_solo_run():
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        flags = [*TINY, "--steps", 10, "--target", 0]
        assert run_main(train, *flags, "--seed", 1)[0] == 0
        before = contents(Path("out"))
        assert_refused(train, *flags, "--seeds", 2, "--resume", says="not trained in this stack")
        assert before.items() <= contents(Path("out")).items()


def test_a_stack_stopped_in_the_middle_goes_on_where_it_was():
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        flags = [*TINY, "--steps", 30, "--target", 0, "--seeds", 2]
        assert run_main(train, *flags)[0] == 0
        runs = sorted(Path("out").iterdir())
        whole = [(train.load(run)[0], train.read_log(run)) for run in runs]
        for run in runs:
            shutil.rmtree(run)
        real, counted = train.evaluate, []

        def interrupted(*arguments, **more):
            counted.append(1)
            if len(counted) == 3:
                raise OSError("the disk is full")
            return real(*arguments, **more)

        with mock.patch.object(train, "evaluate", interrupted):
            assert run_main(train, *flags)[0] == 1
        assert_refused(train, *flags[:-1], 1, "--resume", says="--seeds 2")
        assert run_main(train, *flags, "--resume")[0] == 0
        for run, (model, log) in zip(runs, whole, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(train.load(run)[0].parameters(), model.parameters()))
            assert [row["val"] for row in train.read_log(run)] == [row["val"] for row in log]


def test_checkpoints_are_the_weights_of_their_step():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        assert run_main(train, *TINY, "--save-every", 20, "--out", run)[0] == 0
        assert sorted(p.name for p in (run / "ckpt").iterdir()) == ["000000.pt", "000020.pt", "000040.pt"]
        first, config = train.load(run, "ckpt/000000.pt")
        torch.manual_seed(0)
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), train.build(config).parameters()))
        val = train.evaluate(train.load(run, "ckpt/000020.pt")[0], [config])[0]
        assert abs(val[0] - train.read_log(run)[2]["val"]) < 1e-6


def test_damaged_files_lose_nothing():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        assert run_main(train, *TINY, "--out", run)[0] == 0
        whole = (run / "state.pt").read_bytes()
        for damage in (b"", whole[:1000], whole[:-100], b"no checkpoint"):
            (run / "state.pt").write_bytes(damage)
            before = contents(run)
            assert_refused(train, *TINY, "--out", run, "--resume", says="state.pt is damaged")
            assert contents(run) == before
        (run / "model.pt").write_bytes((run / "model.pt").read_bytes()[:2000])
        try:
            train.load(run)
            assert False, "a damaged model.pt was loaded"
        except ValueError as error:
            assert "model.pt is damaged" in str(error)


def test_run_directories_are_never_overwritten():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        assert run_main(train, *TINY, "--out", run)[0] == 0
        (run / "state.pt").rename(Path(folder, "state.pt"))
        before = contents(folder)
        assert_refused(train, *TINY, "--out", run, says="--resume")
        assert_refused(train, *TINY, "--out", run, "--resume", says="state.pt is missing")
        assert_refused(train, *TINY, "--lr", 0.5, "--out", run, "--resume", says="lr 0.001, not 0.5")
        assert_refused(train, *TINY, "--out", run / "config.json" / "below", says="cannot write")
        assert_refused(train, *TINY, "--out", run / "config.json", says="choose another --out")
        assert_refused(train, *TINY, "--out", folder, says="something else than a run")
        assert contents(folder) == before


def test_bad_flags_get_one_line():
    with tempfile.TemporaryDirectory() as folder:
        for flags, says in (("--D 0", "--D must be at least 1"), ("--heads 3 --width 128", "not divisible"),
                            ("--steps -1", "--steps must be at least 1"), ("--device nope", "--device nope"),
                            ("--lr nan", "--lr must be"), ("--K 3", "even"), ("--layers two", "invalid int value"),
                            ("--rotary none", "invalid choice"), ("--lay 3", "unrecognized"),
                            ("--decay 2", "at most 1"), ("--seeds 2", "leave out --out"),
                            ("--rotary qk --head-size 5", "even"), ("--beta2 1", "at most"),
                            (f"--seed {2 ** 63}", "--seed must be at most")):
            assert_refused(train, *flags.split(), "--out", folder + "/run", says=says)
        for flags, says in (("--D 0", "at least 1"), ("--K 5", "even"), ("--depths x", "invalid int")):
            assert_refused(data, *flags.split(), says=says)
        assert not Path(folder, "run").exists()


def test_a_run_that_blows_up_stops_and_keeps_the_last_good_state():
    with tempfile.TemporaryDirectory() as folder:
        code, out, err = run_main(train, *TINY, "--lr", 1e30, "--clip", 0, "--out", folder + "/run")
        assert code == 1 and "no longer finite" in err and err.count("\n") == 1
        state = train.read_tensors(Path(folder, "run/state.pt"))
        assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_bfloat16_is_float32_within_its_rounding():
    """Loss and gradient of one step: bfloat16 keeps 8 bits, so about 1% of either may differ."""
    steps = []
    for dtype in "float32", "bfloat16":
        flags = train.parse_flags([*"--layers 4 --heads 2 --width 64 --device cpu --dtype".split(), dtype])
        torch.manual_seed(0)
        model, batch = train.build(flags), train.sequences(flags, torch.arange(32))
        with train.precision(flags):
            predictions = model(batch.inputs)
        loss = F.mse_loss(predictions.float(), batch.targets)
        loss.backward()
        steps.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (loss, gradient), (rounded_loss, rounded_gradient) = steps
    assert loss != rounded_loss and abs(loss - rounded_loss) < 0.01 * loss
    assert (gradient - rounded_gradient).norm() < 0.03 * gradient.norm()


def test_run_names_come_from_the_flags():
    for flags, name in (("", "L12_H1_D3_s0"), ("--layers 2 --heads 8 --D 5 --seed 4", "L2_H8_D5_s4"),
                        ("--no-ic --rotary qk", "L12_H1_D3_no-ic_rotaryqk_s0"),
                        ("--no-mlp --head-size 16 --resume --device cpu", "L12_H1_D3_head_size16_no-mlp_s0")):
        assert train.run_directory(train.parse_flags(flags.split())) == Path("out", name)


def test_every_command_line_at_tiny_size():
    with tempfile.TemporaryDirectory() as folder:
        for i, flags in enumerate(("--no-ic", "--rotary qk", "--no-mlp --head-size 4", "--no-causal", "--dtype bfloat16",
                                   "--examples 0", "--optimizer adamw", "--clip 0 --warmup 0 --decay 0",
                                   "--D 3 --heads 1 --K 2")):
            code, out, err = run_main(train, *TINY, *flags.split(), "--out", f"{folder}/{i}")
            assert code == 0 and "val: " in out, err
            assert Path(f"{folder}/{i}/curves.png").read_bytes().startswith(b"\x89PNG")
        for script in ("data.py", "train.py"):
            process = start(script, "--help")
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0 and f"python {script}" in out and not err
        code, out, err = run_main(data, "--D", 3)
        assert code == 0 and "28 tokens" in out
        code, out, err = run_main(data, "--depths", 20)
        assert code == 0 and len(out.splitlines()) == 22


# ---- sweep.py

def test_a_sweep_runs_each_run_once():
    with tempfile.TemporaryDirectory() as folder:
        tiny = "--heads 2 --width 16 --D 1 --N 2 --batch 8 --steps 40 --eval-every 10 --target 0 --device cpu"
        flags = ["--layers", 1, 2, "--seeds", 2, "--flags", tiny, "--flags", tiny + " --no-ic", "--out", folder]
        process = start("sweep.py", *flags, "--workers", 2)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0 and "8/8 runs, 0 failed" in out and not err, out + err
        rows = sweep.read_table(Path(folder, "results.csv"))
        assert len({row["run"] for row in rows}) == len(rows) == 8
        before = contents(folder)
        for name in ("figure4.png", "law.png"):
            Path(folder, name).unlink()
        for more in [], ["--plot-only"]:  # nothing is left to run
            code, out, err = run_main(sweep, *flags, *more)
            assert code == 0 and "runs, 0 failed" not in out and contents(folder) == before, out + err


def test_dask_gets_the_runs_as_one_kind_and_the_longest_first():
    """Dask gives an idle worker what waits at a busy one only if it has seen how long such a task takes."""
    with (tempfile.TemporaryDirectory() as folder, Client(processes=False, n_workers=1, dashboard_address=":0") as client,
          mock.patch.object(sweep, "run_together", lambda runs: [sweep.row_of(runs[0], "not trained")]),
          mock.patch.object(client, "submit", wraps=client.submit) as submit):
        runs = sweep.grid([("--D 1 --device cpu", [1, 3, 2], 2)], Path(folder))
        with contextlib.redirect_stdout(io.StringIO()):
            assert sweep.sweep(runs, Path(folder), client) == 6
    assert [call.args[1][0]["layers"] for call in submit.call_args_list] == [3, 3, 2, 2, 1, 1]
    assert [call.kwargs["priority"] // sweep.cost(call.args[1][0]) for call in submit.call_args_list] == [1] * 6
    assert len({key_split(call.kwargs["key"]) for call in submit.call_args_list}) == 1


def test_least_depths_are_counted_by_seed():
    rows = [dict(seed=seed, layers=layers, x_1=loss) for seed, layers, loss in (
        ("0", "1", "0.9"), ("0", "2", "0.1"), ("0", "3", "0.0"), ("1", "2", "0.7"), ("1", "3", "0.4"), ("2", "3", ""))]
    assert sweep.least_depths(rows, 1) == [2, 3] and sweep.least_depths(rows[:1], 1) == [math.inf]
    assert sweep.least_depths(rows, 2) == []


def test_the_claims_are_counted():
    def row(run, layers, ic="True", causal="True", **losses):
        return dict(run=run, seed="0", layers=layers, D="2", ic=ic, causal=causal, circuit="False", **losses)

    rows = [row("one", "2", x_1="0.1", x_2="0.2", x_1_below_half="10", x_2_below_half="20"),
            row("two", "2", x_1="0.1", x_2="0.8", x_1_below_half="30", x_2_below_half=""),
            row("three", "3", x_1="0.1", x_2="0.1", x_1_below_half="40", x_2_below_half="35"),
            row("four", "3", x_1="0.8", x_2="0.8", x_1_below_half="", x_2_below_half=""),
            row("five", "3", causal="False", x_1="0.9", x_2="0.9", x_1_below_half="", x_2_below_half=""),
            row("six", "1", ic="False", val="0.74"), row("seven", "1", ic="False", val="0.65")]
    table, counted = "\n".join(sweep.claims([row for row in rows if row["causal"] == "True"])).split("\n\n")
    assert "| 2 | 2 | 2, 20 | 1, 20 | 2 of 2 |" in table and "| 3 | 2 | 1, 40 | 1, 35 | 0 of 1 |" in table, table
    assert "above 0.7: 1 of 2 runs" in counted and "in this order: 2 of 3 runs" in counted, counted
    law, beaten = "\n".join(sweep.law_table(rows)).split("\n\n")
    assert "causal mask: the law | 2 | 3 |" in law and "causal mask: attention learned | 2 | 2 |" in law, law
    assert "no mask: the law | 2 | 2 |" in law and "no mask: attention learned | - | - |" in law, law
    assert beaten.endswith(": one (x_2)"), beaten


def sweep_with_a_killed_worker(folder, worker_of, *more):
    """A sweep of which a worker process is killed in the middle: each run must end once, as if nothing had been."""
    process = start("sweep.py", "--layers", 1, 2, "--seeds", 2, "--out", folder, *more, "--flags", "--heads 2 --width 16 --D 1 "
                    "--N 2 --batch 8 --steps 300 --eval-every 10 --target 0 --device cpu")
    wait_for(lambda: len(list(Path(folder).glob("*/state.pt"))) >= 2)
    os.kill(worker_of(process), signal.SIGKILL)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0 and "4/4 runs, 0 failed" in out, out + err
    rows = sweep.read_table(Path(folder, "results.csv"))
    assert len({row["run"] for row in rows}) == len(rows) == 4
    printed = "".join(path.read_text() for path in Path(folder).glob("*.txt"))
    assert "resumed" in printed  # the run of the killed worker went on where it was
    for row in rows:
        log = train.read_log(Path(folder, row["run"]))
        steps = [entry["step"] for entry in log]
        assert steps == list(range(0, 301, 10)) and row["ended"] == "300"
        late = [entry["val"] for entry in log if entry["step"] > 200]  # the paper's final loss: the last 100 steps
        assert abs(float(row["val"]) - sum(late) / 10) < 1e-9 and len(late) == 10


def test_a_sweep_survives_a_killed_worker_process():
    def worker_of(process):
        return next(child.pid for child in psutil.Process(process.pid).children(recursive=True)
                    if "spawn_main" in " ".join(child.cmdline()))

    with tempfile.TemporaryDirectory() as folder:
        sweep_with_a_killed_worker(folder, worker_of, "--workers", 2)


def test_a_sweep_survives_a_killed_worker_of_a_cluster():
    """Two workers of a Dask cluster on loopback, in a folder of their own: the one that is killed never comes back."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_the_end:
        def dask(*arguments):
            process = subprocess.Popen([sys.executable, "-m", "dask", *map(str, arguments)], cwd=folder,
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            at_the_end.callback(process.wait)
            at_the_end.callback(process.kill)
            return process

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        dask("scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")
        workers = [dask("worker", address, "--nthreads", 1, "--no-nanny", "--no-dashboard") for _ in range(2)]
        wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        sweep_with_a_killed_worker(Path(folder, "sweep"), lambda process: workers[0].pid, "--scheduler", address)


def test_sweep_refuses_in_one_line():
    with tempfile.TemporaryDirectory() as folder:
        assert_refused(sweep, "--out", folder, says="--preset")
        assert_refused(sweep, "--layers", 1, "--plot-only", "--out", folder, says="no finished run")
        assert_refused(sweep, "--preset", "laptop", "--seeds", 8, "--out", folder, says="instead of --preset")
        assert_refused(sweep, "--layers", 1, "--workers", 0, "--out", folder, says="at least 1")
        assert_refused(sweep, "--layers", 1, "--scheduler", "nowhere", "--out", folder, says="no cluster")
        assert len(sweep.grid([("--D 1", [2, 2], 1)], Path(folder))) == 1
        began = time.time()
        process = start("sweep.py", "--layers", 1, "--out", folder, "--scheduler", "tcp://127.0.0.1:9")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 2 and "no cluster" in err and len(err.splitlines()) == 1, err
        assert time.time() - began < 15, time.time() - began


# ---- ablate.py

class Planted:
    """Stands in for a transformer and computes a known circuit by following what information goes where: a path is
    taken only while its two roles share a piece (Section 5), the query says what it holds and 0 for what it does not."""

    def __init__(self, D, paths, layers, heads=1, N=4, K=4):
        self.D, self.paths, self.layers, self.heads, self.N, self.K = D, paths, layers, heads, N, K

    def positions(self, x):
        found = torch.empty(len(x), self.N, 2 * self.D + 1, dtype=torch.long)
        for b, tokens in enumerate(x[:, :, :self.K].tolist()):
            for n in range(self.N):
                place = [len(tokens) - self.N + n]
                for _ in range(self.D):
                    a = next(t for t in range(0, len(tokens) - self.N, 2) if tokens[t] == tokens[place[-1]])
                    place += [a, a + 1]
                found[b, n] = torch.tensor(place)
        return found

    def __call__(self, x, patterns=None, return_patterns=False):
        D, N, K, positions, seen = self.D, self.N, self.K, self.positions(x), []
        uniform = ablate.write_pattern("uniform", positions, True).expand(len(x), -1, -1)
        known = data.starting_information(D)
        for layer in range(self.layers):
            shared, before, every = known.float() @ known.float().T > 0, known.float(), []
            for head in ((layer, head) for head in range(self.heads)):
                own = [path for at, path in self.paths if at == head and shared[path]]
                pattern = ablate.write_pattern(own, positions, True, "uniform") if own else uniform
                every.append((patterns or {}).get(head, pattern).expand(len(x), -1, -1))
                moved = ablate.read_paths(every[-1], positions).mean((0, 1))[:, :2 * D + 1] > 0.5
                known = known | (moved.float() @ before > 0)
            seen.append(torch.stack(every, 1))
        held = x.gather(1, positions[:, :, 2::2].reshape(len(x), -1, 1).expand(-1, -1, K)).view(len(x), N, D, K)
        predictions = (held * known[0, 3::2, None]).flatten(2)
        return (predictions, seen) if return_patterns else predictions


def named(*paths):
    """"2 q 1b" -> ((1, 0), (0, 2)): layer 2, its first head, from q to 1b; "2.3 q 1b" is its third head."""
    found = []
    for head, source, target in map(str.split, paths):
        layer, head = map(int, (head + ".1").split(".")[:2])
        found.append(((layer - 1, head - 1), (data.roles(9).index(source), data.roles(9).index(target))))
    return found


PAIRS = ["1 1b 1a", "1 2b 2a", "1 3b 3a"]  # layer 1 lets every b know its a
PLANTED = [(1, named(*PAIRS[:1], "2 q 1b")),
           (2, named(*PAIRS[:2], "2 q 1b", "3 q 2b")),
           (2, named(*PAIRS[:2], "3 1b 2b", "4 q 1b")),
           (3, named(*PAIRS, "2 q 1b", "2 2b 3b", "4 q 2b")),
           (3, named(*PAIRS, "2 q 1b", "2 1b 2b", "3 q 2b", "4 q 3b")),
           (3, named(*PAIRS, "2 q 1b", "3 q 2b", "4 q 3b"))]


def planted_search(D, model, layers):
    config = train.parse_flags(["--D", str(D), "--layers", str(layers), "--device", "cpu", "--dtype", "float32"])
    batch = train.sequences(config, data.validation_index(16))
    means = ablate.mean_attention(model, config, batch)
    return config, batch, [
        ablate.find_circuit(lambda circuit: ablate.measure(model, config, batch, circuit, rest, means).mean().item(),
                            means, 0.05, order, rest)[0]
        for rest in ablate.SIMPLE for order in (sorted(means), sorted(means, reverse=True))]


def test_planted_circuits_are_recovered_exactly():
    for D, paths in PLANTED:
        needed = [p for p in paths if not all(ablate.symbols_reached([o for o in paths if o != p], D, 5))]
        for circuit in planted_search(D, Planted(D, paths, 5), 5)[2]:
            assert set(ablate.paths_of(circuit)) == set(needed), (paths, circuit)


def test_planted_circuits_of_several_heads_are_recovered_exactly():
    for paths in (named("1.1 1b 1a", "1.2 2b 2a", "2.3 q 1b", "3.1 q 2b"),
                  named("1.2 1b 1a", "1.2 2b 2a", "3.1 1b 2b", "3.3 q 1b", "4.2 q 2b")):
        needed = [p for p in paths if not all(ablate.symbols_reached([o for o in paths if o != p], 2, 4))]
        for circuit in planted_search(2, Planted(2, paths, 4, heads=3), 4)[2]:
            assert set(ablate.paths_of(circuit)) == set(needed), (paths, circuit)


def test_redundant_circuits_lose_one_of_their_copies():
    copies = named("2 q 1b", "3 q 1b")
    for circuit in planted_search(1, Planted(1, named("1 1b 1a") + copies, 4), 4)[2]:
        assert ablate.paths_of(circuit) in [named("1 1b 1a") + [copy] for copy in copies]


def test_all_minimal_subsets_are_found():
    """Against trying every subset, for random monotone functions, and for a planted circuit with a copied path."""
    generator = random.Random(0)
    for _ in range(50):
        needed = [frozenset(generator.sample(range(7), generator.randint(1, 4))) for _ in range(generator.randint(0, 5))]
        every = [frozenset(subset) for size in range(8) for subset in itertools.combinations(range(7), size)]
        enough = [subset for subset in every if any(subset >= need for need in needed)]
        expected = {subset for subset in enough if not any(other < subset for other in enough)}
        found = ablate.minimal_subsets(lambda subset: any(subset >= need for need in needed), list(range(7)))
        assert len(found) == len(expected) and set(found) == expected
    model, config = Planted(1, named("1 1b 1a", "2 q 1b", "3 q 1b"), 4), train.parse_flags("--D 1 --layers 4".split())
    batch = train.sequences(config, data.validation_index(16))
    report = ablate.backups(lambda circuit: ablate.measure(model, config, batch, circuit, "mean", means).mean().item(),
                            {}, means := ablate.mean_attention(model, config, batch), 0.05)
    assert report["backed_up"] == ["layer 2 head 1, q -> 1b", "layer 3 head 1, q -> 1b"]
    assert [len(subset) for subset in report["sets"]] == [1, 1] and report["paths_in_every_set"] == 0
    assert report["paths_in_no_set"] == 1  # 1b -> 1a: with patterns held, nothing must be found


def test_certificate_of_a_planted_circuit():
    """Every removal destroys just what the simulation says, and the verdict says so."""
    D, paths = PLANTED[3]
    model = Planted(D, paths, 5)
    config, batch, circuits = planted_search(D, model, 5)
    with contextlib.redirect_stdout(io.StringIO()):
        rows = ablate.certify(model, config, circuits[0], batch, 0)
    verdict = ablate.verdict(config, circuits[0], rows, 0.05)
    # once the patterns above are fixed, 2b -> 3b and q -> 2b alone cannot be spared: x_1 reaches q by way of 2a and 1b
    assert verdict == dict(sufficient=True, all_necessary=True, necessary_in_the_papers_test=2,
                           necessary_with_layers_above_alive=6, paths=6, least_paths=6, rows_on_the_previous_token=0,
                           layers_with_paths=3, least_layers=3, first_useful_layer_is_previous_token=True,
                           predictions_right=6), verdict
    for row in rows[5::2]:
        for k, loss in enumerate(row["partial"], 1):
            assert abs(loss - (f"x_{k}" in row["predicted"])) < 0.3                # 0 where it is held, else about 1

    real, head = ablate.measure, min(head for head, _ in ablate.paths_of(circuits[0]))
    spare = circuits[0] | {head: [*circuits[0][head], (1, 5)]}  # 1a attends to 3a, for nobody

    def worse_when_alive(model, config, batch, circuit, *more):
        return real(model, config, batch, circuit, *more) + 0.5 * (len(circuit) < len(spare))

    with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(ablate, "measure", worse_when_alive):
        rows = ablate.certify(model, config, spare, batch, 0)
    verdict = ablate.verdict(config, spare, rows, 0.05)
    assert verdict["necessary_with_layers_above_alive"] == 6 and not verdict["all_necessary"], verdict
    assert all(abs(row["rise"] - row["mse"] + row["control"]) < 1e-5 for row in rows if "rise" in row)


def test_bootstrap_interval_covers_the_mean():
    covered = 0
    for seed in range(40):
        errors = torch.randn(400, 3, generator=torch.Generator().manual_seed(seed)).square()
        interval = ablate.interval(errors, torch.Generator().manual_seed(seed), resamples=300)
        covered += interval["low"] < 1 < interval["high"]
    assert 33 <= covered <= 40, covered


def test_written_patterns_are_read_back():
    batch = data.make_batch(0, torch.arange(8))
    before = ablate.target_names(3).index("previous token")
    pattern = ablate.write_pattern([(2, 1), (0, 2), (3, before)], batch.positions, True)
    read = ablate.read_paths(pattern, batch.positions)
    assert (read[:, :, 2, 1] == 1).all() and (read[:, :, 0, 2] == 1).all() and (read[:, :, 3, before] == 1).all()
    assert pattern.sum() == 3 * 4 * 8
    for b, n in itertools.product(range(8), range(4)):
        token = batch.positions[b, n, 3].item()
        assert pattern[b, token, max(0, token - 1)] == 1
    for rest in ("identity", "uniform"):
        filled = ablate.write_pattern([(2, 1)], batch.positions, True, rest)
        torch.testing.assert_close(filled.sum(-1), torch.ones(8, 28))
        assert (filled.triu(1) == 0).all()


def test_places_are_where_the_pairs_stand():
    batch = data.make_batch(0, torch.arange(50), D=2)
    for b, n in itertools.product(range(50), range(4)):
        q, a1, b1, a2, b2 = batch.positions[b, n].tolist()
        assert ablate.places(batch.positions)[b, n].tolist() == [q - 16, (a1 - 8) / 2, a2 / 2]


def test_mean_attention_is_what_was_written():
    """One head attends as the position says. In another q looks for pair 1 and takes x_1 from 1b in two places and from the
    token after it in the others, and every 1b attends to its 1a. The means alone write both again, and find just these
    paths."""
    batch = data.make_batch(0, torch.arange(3000), D=2)
    alone = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)).tril()
    alone /= alone.sum(-1, keepdim=True)
    second = alone.repeat(3000, 1, 1)
    for b, n in itertools.product(range(3000), range(4)):
        q, a1, b1, a2, b2 = batch.positions[b, n].tolist()
        second[b, q], second[b, b1] = 0, 0
        second[b, q, b1 if b1 in (9, 13) else b1 + 1] = 1
        second[b, b1, a1], second[b, b1, 0] = 0.7, 0.3
    written = torch.stack([alone.expand(3000, -1, -1), second], 1)

    def model(x, return_patterns):
        return None, [written]

    means = ablate.mean_attention(model, dict(device="cpu", dtype="float32"), batch)
    assert set(ablate.candidates(means[0, 1], "mean")) >= {(0, 2), (2, 1)}
    strong = [path for path in ablate.candidates(means[0, 1], "mean") if means[0, 1].attention[path] > 0.45]
    assert sorted(strong) == [(0, 2), (2, 1)]
    again = ablate.write_pattern(strong, batch.positions, True, "mean", means[0, 1])
    torch.testing.assert_close(again.sum(-1), torch.ones(3000, 20))
    looking = torch.cat([batch.positions[:, :, 0], batch.positions[:, :, 2]], 1)[..., None].expand(-1, -1, 20)
    assert (again - second).gather(1, looking).abs().max() < 1e-4
    assert not any(path[0] == 0 for path in ablate.candidates(means[0, 0], "mean"))
    b = torch.arange(1, 16, 2)
    assert ablate.write_pattern([(0, 5)], batch.positions, True, "mean", means[0, 0]).sum() > 0  # 5: the token before
    alone[b, b - 1] = 0  # else a b would carry its a's symbol
    written_alone = ablate.write_pattern("mean", batch.positions, True, "mean", means[0, 0])
    torch.testing.assert_close(written_alone, alone / alone.sum(-1, keepdim=True))


def test_a_random_model_has_no_circuit():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        assert run_main(train, *TINY, "--out", run)[0] == 0
        code, out, err = run_main(ablate, run, "--sequences", 64)
        assert code == 0 and "circuit: none" in out, err
        assert "no circuit" in json.loads((run / "circuit.json").read_text())["orders"][
            "first layer first, rows without a path: zero"]
        assert_refused(ablate, folder, says="no run directory")
        assert_refused(ablate, run, "--threshold", 0, says="--threshold must be above 0")
        for name in "circuit.json", "log.jsonl":
            (run / name).write_text("{")
            assert_refused(analyze, run, run, says=f"{name} cannot be read")


def test_held_attention_is_not_analyzed():
    """Its model computes patterns that were never trained: they say nothing."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        flags = [*TINY, "--heads", 1, "--circuit", "--out", run]
        assert run_main(train, *flags)[0] == 0
        for module in ablate, analyze:
            assert_refused(module, run, says="trained with --circuit")
        stack = [train.parse_flags(list(map(str, flags))) | dict(seed=seed) for seed in (0, 1)]
        try:
            train.train(stack)
            assert False, "a stack was trained, with free attention"
        except ValueError as error:
            assert "one seed at a time" in str(error)


# ---- analyze.py

def test_information_map_before_any_layer_is_lemma_2():
    """Each role holds its own symbol and no other; no hook stays behind."""
    config = train.parse_flags("--layers 1 --width 32 --D 2 --device cpu".split())
    torch.manual_seed(0)
    model = train.build(config).eval()
    scores = analyze.information(model, config, n=128)
    own = torch.tensor([[role // 2 == k for k in range(3)] for role in range(5)])
    assert scores.shape == (2, 5, 3) and (scores[0][own] > 0.99).all() and (scores[0][~own] < 0.1).all(), scores[0]
    assert not any(module._forward_hooks for module in model.modules())


def test_analyze_draws_every_figure():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        assert run_main(train, *TINY, "--out", run)[0] == 0
        code, out, err = run_main(analyze, run)
        assert code == 0 and "no circuit is known here" in out, err
        heads = [dict(layer=1, head=1, mechanism=[dict(source="1b", target="1a", attention=0.9),
                                                  dict(source="q", target="previous token", attention=0.8)]),
                 dict(layer=1, head=2, mechanism="uniform")]
        (run / "circuit.json").write_text(json.dumps(dict(heads=heads)))
        assert analyze.read_circuit(run) == {(1, 1, "1b", "1a"): 0.9, (1, 1, "q", "previous token"): 0.8}
        assert run_main(analyze, run)[0] == 0
        for name in ("attention_maps", "circuit", "shared_information", "information_map", "curves"):
            assert (run / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
        assert_refused(analyze, folder, says="no run directory")


def test_emergence_against_loops():
    """What is kept of a checkpoint, found again token by token; every figure of Section 9 is drawn, without ckpt/ too."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        assert run_main(train, *TINY, "--save-every", 20, "--out", run)[0] == 0
        paths = [(1, 1, "1b", "1a"), (1, 2, "q", "1b")]
        heads = [dict(layer=layer, head=head, mechanism=[dict(source=source, target=target, attention=0.5)])
                 for layer, head, source, target in paths]
        (run / "circuit.json").write_text(json.dumps(dict(heads=heads)))
        code, out, err = run_main(analyze, run)
        assert code == 0, err
        kept = json.loads((run / "emergence.json").read_text())
        steps = [int(path.stem) for path in sorted((run / "ckpt").iterdir())]
        assert [row["step"] for row in kept["rows"]] == steps and [tuple(path) for path in kept["paths"]] == paths
        model, config = train.load(run, f"ckpt/{steps[-1]:06d}.pt")
        batch = train.sequences(config, data.validation_index(32, first=2 ** 22))
        with torch.no_grad():
            patterns = model(batch.inputs, return_patterns=True)[1]
        for measured, (layer, head, source, target) in zip(kept["rows"][-1]["paths"], paths):
            pattern = patterns[layer - 1][:, head - 1].clone()
            values, hits = [], []
            for b, n in itertools.product(range(32), range(config["N"])):
                place = dict(zip(data.roles(config["D"]), batch.positions[b, n].tolist()))
                values.append(pattern[b, place[source], place[target]].item())
                hits.append(pattern[b, place[source]].argmax().item() == place[target])
                pattern[b, place[source], place[target]] = 0
            assert abs(measured["mean"] - sum(values) / len(values)) < 1e-4
            assert abs(measured["hits"] - sum(hits) / len(hits)) < 1e-4
            with torch.no_grad():
                without = model(batch.inputs, patterns={(layer - 1, head - 1): pattern})
            losses = train.partial_losses(without, batch.targets, config["K"]).mean(0).tolist()
            assert max(abs(a - b) for a, b in zip(measured["without"], losses)) < 1e-4
        shutil.rmtree(run / "ckpt")
        names = ["emergence.png", "paths.png", "removal.png", "emergence.gif"]
        for name in names:
            (run / name).unlink()
        assert run_main(analyze, run)[0] == 0 and all((run / name).stat().st_size > 1000 for name in names)
        shutil.copytree(run, Path(folder, "other"))
        code, out, err = run_main(analyze, run, Path(folder, "other"))
        assert code == 0 and "over the runs of a kind" in out and "in this order | not measured" in out, (out, err)


def test_emergence_steps_are_interpolated():
    rows = [dict(step=step, paths=[dict(mean=mean), dict(mean=0.1)]) for step, mean in ((0, 0.1), (10, 0.2), (20, 0.8))]
    assert analyze.emergence_steps(dict(rows=rows, paths=["one", "other"])) == {"one": 15.0, "other": None}


def test_what_emerged_first_is_counted():
    """Four runs by hand: an induction head first and needed later, one that nothing needs, another head, a close finish."""
    def run_of(folder, name, crossing, needed):
        """crossing: {path: the step at which its attention passes 0.5}; every tenth step is measured."""
        run = Path(folder, name)
        run.mkdir()
        steps, paths = range(0, 101, 10), list(crossing)
        (run / "config.json").write_text(json.dumps(train.parse_flags(["--D", "2"]) | dict(out="")))
        (run / "log.jsonl").write_text("".join(json.dumps(dict(
            step=step, val=0.1, x_1=1 - (step >= 30), x_2=1 - (step >= 50))) + "\n" for step in steps))
        heads = [dict(layer=layer, head=head, mechanism=[dict(source=source, target=target, attention=0.9)])
                 for layer, head, source, target in paths]
        (run / "circuit.json").write_text(json.dumps(dict(heads=heads)))
        rows = [dict(step=step, losses=[0.0, 0.0], paths=[
            dict(mean=0.5 + 0.02 * min(20, max(-20, step - crossing[path])), without=[0.9, needed]) for path in paths])
            for step in steps]
        (run / "emergence.json").write_text(json.dumps(dict(sequences=1, paths=paths, rows=rows)))
        return run

    below, induction, other = (1, 1, "1b", "1a"), (2, 1, "q", "1b"), (3, 1, "q", "2b")
    with tempfile.TemporaryDirectory() as folder:
        runs = [run_of(folder, "first", {below: 5, induction: 15, other: 55}, needed=0.8),
                run_of(folder, "spare", {below: 35, induction: 15, other: 55}, needed=0.2),
                run_of(folder, "late", {below: 65, induction: 55, other: 15}, needed=0.8),
                run_of(folder, "close", {below: 5, induction: 12, other: 17}, needed=0.8)]
        out = analyze.compare(runs)
        assert Path(folder, "order.png").stat().st_size > 1000
    assert "| first | 0.1000 | none" in out and "| layer 3: q -> 2b at 15 |" in out, out
    assert "| layer 1: 1b -> 1a at 5, layer 2: q -> 1b at 15, layer 3: q -> 2b at 55 |" in out, out
    for claim in ("when the last symbol is learned | 3 of 4", "cross 0.5 in this order | 4 of 4",
                  "an induction head first (q -> 1b, with 1b -> 1a below, before any other) | 3 of 4",
                  "a checkpoint stands between it and the next path | 2 of 3", "passes 0.5 before its q -> 1b | 2 of 3",
                  "a later symbol is lost | 2 of 3",
                  "from x_1 to x_2, median (range) | 20 (20 to 20)"):
        assert claim in out, (claim, out)


# ---- llm.py

# Appendix A: what each example chose, in the order in which the generators choose, and the example itself, several
# lines of it on one line.
APPENDIX_A = {
    "equations": (["bcda", "2301", "eghf", "badc", "kilj", "efgh", "npom", "klij", "qsrt", "npom", "s"], """\
b = 2 | c = 3 | d = 0 | a = 1
e = b | g = a | h = d | f = c
k = e | i = f | l = g | j = h
n = k | p = l | o = i | m = j
q = n | s = p | r = o | t = m
What is the value of s? Say directly only the numeric value, without any other words.
Correct: 1
Acceptable: 0, 1, 2, 3
"""),
    "lives-with": (["Charlie David Alice Bob", "Cairo Delhi Berlin Amsterdam", "Henry Eve Frank Grace",
                    "David Charlie Alice Bob", "Kate Larry Jack Isabelle", "Grace Frank Eve Henry",
                    "Mary Olivia Nick Peter", "Jack Isabelle Kate Larry", "Rose Queen Tom Sam",
                    "Peter Nick Olivia Mary", "Rose"], """\
Charlie lives in Cairo | David lives in Delhi | Alice lives in Berlin | Bob lives in Amsterdam
Henry lives with David | Eve lives with Charlie | Frank lives with Alice | Grace lives with Bob
Kate lives with Grace | Larry lives with Frank | Jack lives with Eve | Isabelle lives with Henry
Mary lives with Jack | Olivia lives with Isabelle | Nick lives with Kate | Peter lives with Larry
Rose lives with Peter | Queen lives with Nick | Tom lives with Olivia | Sam lives with Mary
Where does Rose live? Say directly only the name of the city, without any other words.
Correct: Berlin
Acceptable: Amsterdam, Berlin, Cairo, Delhi
"""),
    "kingdoms": (["Silvania Novaria Aurora Florinia", "Bob Alice Charlie David", "celestian harmonian elysian lumin",
                  "Silvania Novaria Aurora Florinia", "beef pork lamb chicken", "lumin elysian harmonian celestian",
                  "Astralyte Nephryon Zephyrium Virellium", "beef chicken lamb pork",
                  "Chronogy Aetherflux Somnosis Synthemia", "Zephyrium Astralyte Virellium Nephryon", "Chronogy"], """\
Bob lives in Silvania. | Alice lives in Novaria. | Charlie lives in Aurora. | David lives in Florinia.
Silvanians believe in celestianism. | Novarians believe in harmonianism. | Aurorans believe in elysianism.
Florinians believe in luminism.
Luminists eat beef. | Elysianists eat pork. | Harmonianists eat lamb. | Celestianists eat chicken.
Beef contains Astralyte. | Chicken contains Nephryon. | Lamb contains Zephyrium. | Pork contains Virellium.
Zephyrium causes Chronogy. | Astralyte causes Aetherflux. | Virellium causes Somnosis. | Nephryon causes Synthemia.
Who has Chronogy? Say directly the name without other words.
Correct: Alice
Acceptable: Alice, Bob, Charlie, David
"""),
    "functions": (["3201", "1320", "1032", "1023", "bacd", "0231", "f", "i"], """\
a(0) = 3 | a(1) = 2 | a(2) = 0 | a(3) = 1 | b(0) = 1 | b(1) = 3 | b(2) = 2 | b(3) = 0
c(0) = 1 | c(1) = 0 | c(2) = 3 | c(3) = 2 | d(0) = 1 | d(1) = 0 | d(2) = 2 | d(3) = 3
e = b | f = a | g = c | h = d | i = 0 | j = 2 | k = 3 | l = 1
What is the value of f(i)? Say directly only the numeric value, without any other words.
Correct: 3
Acceptable: 0, 1, 2, 3
"""),
    "relatives": (["Penny Lily Isabelle Cathy George Adam Kevin Ed Hank Mike Jane Fred Dana Olivia Bob Nancy",
                   "Canada Brazil France Kenya Italy Mexico Peru Laos Germany Japan England Hungary Norway Qatar "
                   "Denmark Argentina",
                   "Jane Olivia Penny Dana Nancy Isabelle Lily Cathy", "Ed Mike Adam George Hank Bob Fred Kevin",
                   "brother mother sister father", "doctor engineer teacher lawyer", "Eve"], """\
Penny lives in Canada. | Lily lives in Brazil. | Isabelle lives in France. | Cathy lives in Kenya.
George lives in Italy. | Adam lives in Mexico. | Kevin lives in Peru. | Ed lives in Laos.
Hank lives in Germany. | Mike lives in Japan. | Jane lives in England. | Fred lives in Hungary.
Dana lives in Norway. | Olivia lives in Qatar. | Bob lives in Denmark. | Nancy lives in Argentina.
Johns mother is Jane. | Johns sister is Olivia. | Johns father is Ed. | Johns brother is Mike.
Chriss mother is Penny. | Chriss sister is Dana. | Chriss father is Adam. | Chriss brother is George.
Dianas mother is Nancy. | Dianas sister is Isabelle. | Dianas father is Hank. | Dianas brother is Bob.
Eves mother is Lily. | Eves sister is Cathy. | Eves father is Fred. | Eves brother is Kevin.
Doctors live with their brothers. | Lawyers live with their mothers. | Teachers live with their sisters.
Engineers live with their fathers.
John works as a doctor. | Chris works as an engineer. | Diana works as a teacher. | Eve works as a lawyer.
Where does Eve live? Say directly only the name, without any other words.
Correct: Brazil
Acceptable: Argentina, Brazil, Canada, Denmark, England, France, Germany, Hungary, Italy, Japan, Kenya, Laos, \
Mexico, Norway, Peru, Qatar
"""),
}


class ChoicesOfThePaper:
    """Stands in for random.Random: hands out the choices of an example, each only where it is one of those offered."""

    def __init__(self, choices):
        self.choices = [c.split() if " " in c else c if len(c) == 1 or c[0].isupper() else list(c) for c in choices]

    def sample(self, items, k):
        choice = self.choices.pop(0)
        assert sorted(choice) == sorted(items) and k == len(items), (choice, items)
        return choice

    def choice(self, items):
        choice = self.choices.pop(0)
        assert choice in items, (choice, items)
        return choice


def test_llm_appendix_a_letter_by_letter():
    for formulation, (choices, example) in APPENDIX_A.items():
        rng = ChoicesOfThePaper(choices)
        with mock.patch.object(llm.random, "Random", lambda seed: rng):
            assert run_main(llm, "--show", formulation) == (0, example.replace(" | ", "\n"), "")
        assert not rng.choices, "the example makes choices that the generator does not"


def test_llm_questions_agree_with_the_solver():
    for formulation in llm.FORMULATIONS:
        for D in (1, 5, 8, 30) if formulation == "equations" else (None,):
            questions = [llm.make_question(formulation, D, 0, index) for index in range(300)]
            given = [correct for _, correct, _ in questions]
            assert given == [llm.solve(prompt) for prompt, _, _ in questions]
            assert all(acceptable == sorted(set(given)) for _, _, acceptable in questions)  # each is right at some time
            assert max(given.count(answer) for answer in given) < 2 * 300 / len(set(given))  # so chance is 1/4, 1/16
            prompts = {prompt for prompt, _, _ in questions}
            assert len(prompts) == 300 or D == 1  # D = 1 has only 24 * 24 * 4 questions
            assert len({prompt.split("\n")[-1] for prompt in prompts}) == (16 if formulation == "functions" else 4)
    assert llm.make_question("kingdoms", None, 0, 7) == llm.make_question("kingdoms", None, 0, 7)
    assert llm.make_question("kingdoms", None, 0, 7) != llm.make_question("kingdoms", None, 1, 7)
    assert [llm.name(i) for i in (0, 25, 26, 27, 51, 52, 701, 702)] == "a z aa ab az ba zz aaa".split()


def test_llm_four_chains_have_four_answers():
    for formulation, things in ("equations", "qrst"), ("kingdoms", "Chronogy Synthemia Somnosis Aetherflux".split()):
        prompt, _, acceptable = llm.make_question(formulation, 5, 0, 3)
        before, after = prompt.split("?")
        start = before.rindex(" ") + 1
        assert sorted(llm.solve(f"{before[:start]}{thing}?{after}") for thing in things) == acceptable


def test_llm_solver_finds_no_answer_where_there_is_none_or_two():
    def error_of(*lines):
        try:
            return llm.solve("\n".join(lines))
        except (KeyError, ValueError) as error:
            return type(error)

    for formulation in llm.FORMULATIONS:
        *facts, question = llm.make_question(formulation, 5, 0, 0)[0].split("\n")
        assert error_of(facts[0], *facts, question) == ValueError, "said twice"
        assert error_of(question) == KeyError, "nothing is said"
        assert error_of(*facts, "So what?") == error_of("Once there was a king", *facts, question) == ValueError
    assert error_of("a = 1", "c = b", "What is the value of c?") == KeyError, "b is never said"


def test_llm_wilson_interval():
    assert [round(x, 4) for x in llm.wilson(5, 10)] == [0.2366, 0.7634]
    for n in (1, 7, 500):
        for k in range(0, n + 1, max(1, n // 7)):
            for end in llm.wilson(k, n):  # by definition the ends p solve |k/n - p| = 1.96 sqrt(p (1 - p) / n)
                assert abs(abs(k / n - end) - 1.959964 * (end * (1 - end) / n) ** 0.5) < 1e-9
        assert llm.wilson(0, n)[0] == 0 and llm.wilson(n, n)[1] == 1


# A chat-completions server with scripted models, which misbehaves when told to.

KEY = "sk-test-0123456789-do-not-print"


def perfect(prompt, rng):
    return llm.solve(prompt)


def acceptable_answers(prompt):
    """Read from the prompt."""
    if "numeric" in prompt:
        return list("0123")
    homes = [line.rstrip(".").split(" lives in ") for line in prompt.split("\n") if " lives in " in line]
    return [person if "Who has" in prompt else place for person, place in homes]


def guessing(prompt, rng):
    """One of the acceptable answers, after idle talk in one case of four."""
    return "I would have to think." if rng.random() < 0.25 else rng.choice(acceptable_answers(prompt))


def right_with_probability_06(prompt, rng):
    correct = llm.solve(prompt)
    return correct if rng.random() < 0.6 else rng.choice([a for a in acceptable_answers(prompt) if a != correct])


def error_body(message):
    return json.dumps({"error": {"message": message, "type": "error", "param": None, "code": None}})


FAULTS = {  # status, body
    "rate limit": (429, error_body("slow down")), "overloaded": (503, error_body("overloaded")),
    "bad gateway": (502, "<html>bad gateway</html>"), "unauthorized": (401, error_body(f"no such key: {KEY}")),
    "not found": (404, error_body("no such model")), "broken JSON": (200, '{"choices": [{"message": {"cont'),
    "error as 200": (200, error_body(f"upstream failed with {KEY}")), "web page": (200, "<html>sign in</html>"),
    **{name: (400, error_body(f"Unsupported parameter: '{name}' is not supported with this model."))
       for name in ("max_tokens", "temperature", "max_completion_tokens")}}


class ScriptedModel(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # one packet per reply

    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = request["messages"][0]["content"]
        with server.lock:
            fault = server.faults(len(server.requests))
            server.requests.append((time.time(), prompt))
            server.open_requests += 1
            server.most_open = max(server.most_open, server.open_requests)
        time.sleep(1 if fault == "silent" else server.delay)
        with server.lock:
            server.open_requests -= 1
            answer = None
            if not fault:  # drawn anew for every prompt, so that the order in which they come does not matter
                answers = server.answers.setdefault(prompt, [])
                answer = server.model(prompt, random.Random(f"{prompt} {len(answers)}"))
                answers.append(answer)
        status, body = FAULTS.get(fault) or (200, json.dumps({
            "id": "x", "object": "chat.completion", "created": 0, "model": "scripted",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102}}))
        self.close_connection = fault in ("silent", "reset", "cut off")
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return self.connection.close()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) + (100 if fault == "cut off" else 0)))
        if fault == "rate limit":
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def scripted_server(model=perfect, faults=lambda number: None, delay=0.0):
    """Serves chat completions on 127.0.0.1, to which the environment points; faults(number of the request) names the
    fault. Yields an object with .answers, {prompt: [answer, ...]}, .requests, [(time, prompt)], .most_open."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ScriptedModel, bind_and_activate=False)
    server.request_queue_size, server.handle_error = 128, lambda *_: None
    server.server_bind()
    server.server_activate()
    server.model, server.faults, server.delay, server.lock = model, faults, delay, threading.Lock()
    server.answers, server.requests, server.open_requests, server.most_open = {}, [], 0, 0
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    with environment(server.url):
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()


def environment(url, key=KEY):
    return mock.patch.dict("os.environ", OPENAI_API_KEY=key, OPENAI_BASE_URL=url, NO_PROXY="127.0.0.1")


def run_llm(*arguments):
    code, out, err = run_main(llm, *arguments)
    assert KEY not in out + err
    return code, out, err


def attempts_in(path):
    """{question: its attempts} in an answers file: every line is whole, and nothing was asked again once settled."""
    text, asked = Path(path).read_text(), {}
    assert KEY not in text
    for line in map(json.loads, text.splitlines()):
        asked.setdefault((line["formulation"], line["D"], line["index"]), []).append(line)
    for attempts in asked.values():
        assert [attempt["attempt"] for attempt in attempts] == list(range(1, len(attempts) + 1))
        assert not any(attempt["acceptable"] for attempt in attempts[:-1])
    return asked


def test_llm_scripted_models_score_what_they_are():
    with tempfile.TemporaryDirectory() as folder:
        models = (perfect, 10, 2, 1), (guessing, 80, 5, 1 / 4), (right_with_probability_06, 80, 7, 0.6)
        for model, n, D, truth in models:
            path = Path(folder, model.__name__)
            with scripted_server(model) as server:
                code, out, err = run_llm("--model", "m", "--n", n, "--D", D, "--out", path)
            assert code == 0, err
            rows = llm.scores(attempts_in(path))
            assert list(rows) == [("equations", D), *((f, None) for f in list(llm.FORMULATIONS)[1:])]
            for (formulation, _), row in rows.items():
                low, high = llm.wilson(row["correct"], n)
                p = 1 / 16 if model is guessing and formulation == "relatives" else truth
                assert row["n"] == n and low <= p <= high, (model, formulation, low, high)
                assert f"{row['correct'] / n:.1%}  {low:6.1%} - {high:6.1%}" in out
            # the same numbers by another way: what the server said, against the solver
            right = {prompt: [answer == llm.solve(prompt) for answer in answers]
                     for prompt, answers in server.answers.items()}
            asked = sum(len(answers) for answers in right.values())
            assert sum(row["attempts"] for row in rows.values()) == asked == len(server.requests)
            assert len(right) == 5 * n
            assert sum(row["correct"] for row in rows.values()) == sum(answers[-1] for answers in right.values())
            assert sum(row["first"] for row in rows.values()) == sum(answers[0] for answers in right.values())
            assert (asked > 5 * n) == (model is guessing)
            spent = f"{asked} attempts (0 of them empty), {100 * asked} tokens in, {2 * asked} tokens out\n"
            assert f"{5 * n}/{5 * n} questions, 0.0 min left, {spent}" in out and out.count(spent) == 2


def test_llm_asks_until_acceptable_and_says_what_was_not():
    never = llm.make_question("kingdoms", None, 3, 1)[0]
    talk = iter(["It must be 7", None, "<think>0, no, 1</think>\n **{}.**"])  # the third is the answer, dressed up

    def model(prompt, rng):
        answer = None if prompt == never else next(talk, "{}")
        return answer and answer.format(llm.solve(prompt))

    with tempfile.TemporaryDirectory() as folder, scripted_server(model) as server:
        flags = ["--model", "m", "--seed", 3, "--n", 2, "--D", 2, "--attempts", 5, "--out", folder + "/a"]
        code, out, err = run_llm(*flags)
        rows = llm.scores(attempts_in(folder + "/a"))
        assert code == 0 and "(6 of them empty)" in out
        assert rows["equations", 2] == {"n": 2, "correct": 2, "first": 1, "attempts": 4, "unresolved": 0}
        assert rows["kingdoms", None] == {"n": 2, "correct": 1, "first": 1, "attempts": 6, "unresolved": 1}
        assert len(server.requests) == 4 + 6 + 3 * 2
        assert run_llm(*flags)[0] == 0 and len(server.requests) == 16  # nothing is left to ask, not even the unresolved


def test_llm_survives_every_fault_and_keeps_each_answer_once():
    faults = ["max_tokens", "temperature", "max_completion_tokens", None, "rate limit", "overloaded", "bad gateway",
              "silent", "broken JSON", "error as 200", "web page", "empty", "reset", "cut off"]
    with tempfile.TemporaryDirectory() as folder, \
            scripted_server(faults=lambda n: faults[n] if n < len(faults) else None) as server:
        code, out, err = run_llm("--model", "m", "--n", 8, "--D", 2, 3, "--timeout", 0.5, "--concurrency", 2,
                                 "--out", folder + "/a")
        asked = attempts_in(folder + "/a")
        attempts = [attempt for attempts in asked.values() for attempt in attempts]
        assert code == 0 and len(asked) == 6 * 8 and all(attempts[-1]["correct"] for attempts in asked.values()), err
        assert len(attempts) == 6 * 8 + 1 and "(1 of them empty)" in out  # no other fault counts as an attempt
        assert [len(answers) for answers in server.answers.values()] == [1] * 6 * 8
        assert len(server.requests) == 6 * 8 + len(faults) - 1
        assert [line.split(":")[0] for line in out.splitlines() if line.startswith("going on with")] == [
            "going on with {'temperature'", "going on with {'max_completion_tokens'", "going on with no options"]
        assert all(attempt["options"] == {} for attempt in attempts)
        limited, prompt = server.requests[faults.index("rate limit")]
        assert any(1 <= again - limited < 2 for again, p in server.requests if p == prompt), "Retry-After was 1 second"


def test_llm_ends_in_one_clear_line():
    with tempfile.TemporaryDirectory() as folder:
        for before, fault, says in (  # the server behaves for so many requests, and what it answered must be kept
                (0, "unauthorized", "no such key: ***"), (2, "unauthorized", "***"), (2, "not found", "no such model"),
                (0, "overloaded", "overloaded"), (2, "rate limit", "slow down"), (0, "reset", "no reply from http"),
                (2, "cut off", "no reply from http"), (2, "silent", "(ReadTimeout)"), (0, "web page", "sign in"),
                (2, "broken JSON", "2 replies in a row were no chat comp"), (2, "error as 200", "failed with ***")):
            path = f"{folder}/{fault}{before}"
            with scripted_server(faults=lambda n: fault if n >= before else None) as server:
                code, out, err = run_llm("--model", "m", "--n", 2, "--concurrency", 1, "--retries", 1,
                                         "--timeout", 0.2, "--out", path)
            assert code == 2 and err.count("\n") == 1 and says in err, err
            assert len(attempts_in(path)) == len(server.answers) == before
            assert len(server.requests) == before + (1 if fault in ("unauthorized", "not found") else 2), "bounded"
        with environment("http://127.0.0.1:9/v1"):
            assert_refused(llm, "--model", "m", "--retries", 1, "--out", folder + "/b", says="no reply from http")


def test_llm_stopped_run_goes_on_where_it_was():
    with tempfile.TemporaryDirectory() as folder:
        for blow in signal.SIGKILL, signal.SIGINT:
            path = Path(folder, blow.name)
            flags = "--model", "m", "--n", 30, "--D", 5, "--concurrency", 8, "--out", path
            with scripted_server(delay=0.02) as server:
                process = start("llm.py", *flags)
                wait_for(lambda: len(server.answers) > 50)
                process.send_signal(blow)
                out, err = process.communicate(timeout=20)
                assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[blow]
                assert err == ("" if blow == signal.SIGKILL else "llm.py: stopped; the same command goes on\n")
                time.sleep(0.2)  # the server finishes what it was asked before
                kept, answered = attempts_in(path), len(server.answers)
                assert answered - 8 <= len(kept) <= answered < 150  # not kept: at most what was under way
                if blow == signal.SIGKILL:
                    path.write_bytes(path.read_bytes()[:-10])  # as if the kill had come within the last line
                    kept.popitem()
                server.answers.clear()
                code, out, err = run_llm(*flags)
                assert code == 0 and f"150 questions, {len(kept)} of them answered before" in out
                assert len(attempts_in(path)) == 150
                assert [len(answers) for answers in server.answers.values()] == [1] * (150 - len(kept))
                assert not {llm.make_question(f, D, 0, index)[0] for f, D, index in kept} & set(server.answers)
                assert run_llm(*flags)[0] == 0 and len(server.answers) == 150 - len(kept)
                assert server.most_open == 8


def test_llm_settings_are_never_mixed():
    with tempfile.TemporaryDirectory() as folder, scripted_server() as server:
        path = Path(folder, "a")
        same = ["--model", "m", "--n", 2, "--D", 5, "--out", path]
        assert run_llm(*same)[0] == 0
        before = contents(folder)
        for flag, value, held in (("--seed", 1, 0), ("--temperature", 0, 1.0), ("--max-tokens", 9, 4096),
                                  ("--attempts", 3, 10), ("--model", "x", "m")):
            assert_refused(llm, *same, flag, value, says=f"{held}, not {value}")
        with environment(server.url + "/other"):
            assert_refused(llm, *same, says="endpoint http://127.0.0.1")
        assert contents(folder) == before and len(server.requests) == 10
        assert run_llm(*same, "--n", 3, "--D", 5, 7)[0] == 0 and len(server.requests) == 10 + 5 + 3  # more of the same
        for text in "my notes", "my notes\n", "{}\n", '["x"]\n':
            path.write_text(text)
            assert_refused(llm, *same, says="is not an answers file")
            assert_refused(llm, "--plot", path, says="is not an answers file")
            assert path.read_text() == text


def test_llm_bad_flags_get_one_line():
    with environment("", key=""):
        assert_refused(llm, "--model", "m", says="set OPENAI_API_KEY, or OPENAI_BASE_URL")
    for flags, says in (("", "required"), ("--show F1", "invalid choice"), ("--show functions --model m", "not"),
                        ("--mod m", "required"), ("--model m x", "unrecognized"), ("--model m --n 0", "at least 1"),
                        ("--model m --n many", "invalid int"), ("--model m --D 3 0", "at least 1"),
                        ("--model m --temperature nan", "at least 0"), ("--model m --timeout 0", "above 0"),
                        ("--model m --concurrency 0", "at least 1"), ("--model m --retries -1", "at least 0"),
                        ("--plot none.jsonl", "No such file")):
        assert_refused(llm, *flags.split(), says=says)


def test_llm_figure_2_says_scripted_model():
    import matplotlib
    with tempfile.TemporaryDirectory() as folder, matplotlib.rc_context({"svg.fonttype": "none"}):
        files, figure = [Path(folder, "guessing"), Path(folder, "other")], Path(folder, "f", "figure2.svg")
        with scripted_server(guessing):
            for file, D in zip(files, (5, 10)):
                assert run_llm("--model", file.name, "--n", 3, "--D", D, 2, "--out", file)[0] == 0
        assert list(llm.scores(attempts_in(files[1])))[:2] == [("equations", 2), ("equations", 10)]
        code, out, err = run_llm("--plot", *files, "--out", figure)
        assert code == 0 and out.count("relatives") == 2, err
        for words in ("scripted model: guessing (n = 3", "scripted model: other (n = 3", "relatives",
                      "random guessing: 1/4, relatives 1/16", "accuracy (%), Wilson 95% interval"):
            assert words in figure.read_text(), words
        some = "".join(line for line in files[0].open() if '"lives-with"' in line)  # not all of the formulations
        files[0].write_text(some.replace('"served": "scripted"', '"served": "real"'))
        assert run_llm("--plot", files[0], "--out", figure)[0] == 0 and "scripted" not in figure.read_text()
        files[0].write_text("")
        assert_refused(llm, "--plot", files[0], says="no answered question")
        code, out, err = run_llm("--plot", *files, "--out", figure)
        assert code == 0 and "guessing holds no answered question: left out" in out
        assert_refused(llm, "--plot", files[1], "--out", folder + "/a.jsonl", says="not supported")


# ---- what is committed

def test_committed_runs_score_what_their_log_says():
    runs = sorted(path.parent for path in (HERE / "results").glob("*/model.pt"))
    assert runs
    for run in runs:
        model, config = train.load(run)
        val, logged = train.evaluate(model, [config], n=512)[0], train.read_log(run)[-1]["val"]
        assert abs(sum(val) / len(val) - logged) < 0.1 * logged + 1e-3, (run, val, logged)
        assert not config["target"] or train.read_log(run)[-1]["confirmed"] < config["target"]


def main():
    words, counts = sys.argv[1:], {"passed": 0, "failed": 0}
    tests = {name: test for name, test in globals().items() if name.startswith("test_")
             and (not words or any(word in name for word in words))}
    for name, test in tests.items():
        began, error = time.time(), None
        try:
            test()
        except Exception:
            error = traceback.format_exc()
        counts["failed" if error else "passed"] += 1
        print(f"{'FAILED' if error else 'passed'}  {time.time() - began:5.1f} s  {name}\n{error or ''}", end="", flush=True)
    print(f"{counts['passed']} passed, {counts['failed']} failed")
    sys.exit(1 if counts["failed"] or not tests else 0)


if __name__ == "__main__":
    main()
