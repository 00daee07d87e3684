"""The repository in one specification: each stage against something independent of it.

python test_all.py              # these smoke tests, half a minute
python test_all.py data model   # those with one of these words in their name
python test_all.py --all        # those of tests/ too, on all cores, but for the slow ones
python test_all.py --slow       # all of them: kills, searches, committed weights
"""

import contextlib
import io
import json
import pathlib
import re
import shlex
import sys
from unittest import mock

import ablate
import analyze
import data
import sweep
import train
from model import Transformer

import pytest
import torch
import torch.nn.functional as F


HERE = pathlib.Path(__file__).parent
STAGES = "data model train ablate analyze sweep test_all".split()
TINY = "--layers 2 --heads 2 --width 16 --D 1 --N 2 --batch 8 --steps 40 --eval-every 10"
TINY = f"{TINY} --stop-below 0 --warmup 5 --save-every 20 --device cpu"


# ---- helpers


@pytest.fixture(autouse=True)
def one_thread():
    """More threads only wait on tensors this small."""
    torch.set_num_threads(1)


def run_main(module, arguments):
    """Run a command line in this process; return (exit code, stdout, stderr)."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = [pathlib.Path(module.__file__).name, *shlex.split(arguments)]
    redirected = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with mock.patch.object(sys, "argv", argv), redirected[0], redirected[1]:
        try:
            module.main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """A run of TINY, to read only."""
    run = tmp_path_factory.mktemp("tiny") / "run"
    code, _, err = run_main(train, f"{TINY} --out {run}")
    assert code == 0, err
    return run


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


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


# ---- data


def test_data_has_the_targets_that_following_the_pairs_finds():
    for N, D, K in (4, 3, 4), (2, 1, 2), (7, 5, 4), (1, 2, 2):
        batch = data.make_batch(1, torch.arange(20), N, D, K)
        for tokens, targets in zip(batch.inputs, batch.targets, strict=True):
            assert torch.equal(targets, follow(tokens, N, D, K))


def test_data_has_the_targets_that_searching_the_triples_finds():
    """16 triples of x, y and z, then 4 pairs of a and y, 4 pairs of a and x, and 4 queries a."""
    batch = data.make_batch(1, torch.arange(20), task="conditional")
    for tokens, targets in zip(batch.inputs, batch.targets, strict=True):
        symbols = [tuple(token[:4].tolist()) for token in tokens]
        x_of, y_of, z_of = {}, {}, {}
        for i in range(0, 48, 3):
            x, y, z = symbols[i : i + 3]
            z_of[x, y] = z
        for i in range(0, 8, 2):
            y_of[symbols[48 + i]] = symbols[49 + i]
            x_of[symbols[56 + i]] = symbols[57 + i]
        for query, target in zip(symbols[64:], targets, strict=True):
            x, y = x_of[query], y_of[query]
            assert torch.equal(target, torch.tensor([*x, *y, *z_of[x, y]]))


def test_data_is_a_function_of_seed_and_number():
    whole = data.make_batch(5, torch.arange(10))
    for number in range(10):
        alone = data.make_batch(5, torch.tensor([number]))
        assert torch.equal(alone.inputs[0], whole.inputs[number])
    assert not torch.equal(data.make_batch(6, torch.arange(10)).inputs, whole.inputs)


def test_data_of_an_epoch_is_each_example_once_and_none_held_out():
    steps = [data.batch_index(0, step, batch=6, examples=24) for step in range(8)]
    for epoch in torch.cat(steps).split(24):
        assert sorted(epoch.tolist()) == [*range(24)]
    assert not torch.equal(steps[0], steps[4])
    assert torch.equal(data.batch_index(0, 3, 16, examples=0), torch.arange(48, 64))  # no epochs
    seen = [data.held_out(split, 1000) for split in data.SPLITS]
    assert len(torch.cat(seen).unique()) == 1000 * len(seen) and torch.cat(seen).max() < 0


# ---- model


def rotated(x, angles):
    """RoPE as a product of complex numbers."""
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(12, 4), angles)
    return torch.cat([turned.real, turned.imag], -1)


def small(layers, **options):
    """A model of 12 tokens of 6 numbers, the last 2 queries, with 2 heads of 8 numbers."""
    torch.manual_seed(0)
    sizes = dict(T=12, N=2, inputs=6, outputs=5, heads=2, width=16, head_size=8, qk_std=1)
    return Transformer(layers=layers, **sizes, **options)


def test_model_layers_are_pytorchs_own_attention_and_mlp():
    angles = data.rotary_angles(12, 8)
    for causal, rotary in (True, None), (False, None), (True, angles), (False, angles):
        model = small(1, causal=causal, angles=rotary)
        x, block = torch.randn(3, 12, 6), model.blocks[0]
        stream = model.embed(x)
        q, k, v = block.qkv(block.ln1(stream)).chunk(3, -1)
        q, k, v = (x.view(3, 12, 2, 8).transpose(1, 2) for x in (q, k, v))  # (B, heads, T, size)
        if rotary is not None:
            q, k = rotated(q, angles), rotated(k, angles)
        written = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        stream = stream + block.out(written.transpose(1, 2).flatten(2))
        stream = stream + block.down(F.gelu(block.up(block.ln2(stream))))
        expected = model.head(model.ln(stream))[:, -2:]
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


def test_model_knows_nothing_of_later_tokens():
    model, x = small(3), torch.randn(3, 12, 6)
    changed = x.clone()
    changed[:, 11] += 100  # the second query
    before, after = model(x), model(changed)
    assert torch.equal(before[:, 0], after[:, 0]) and not torch.equal(before[:, 1], after[:, 1])


def test_model_heads_can_be_read_and_replaced():
    model, x, seen = small(3), torch.randn(3, 12, 6), []

    def same(pattern, values):
        seen.append(pattern)
        return pattern @ values

    def silent(pattern, values):
        pattern *= 0
        return pattern @ values

    predictions, patterns = model(x, return_patterns=True)
    torch.testing.assert_close(model(x, heads={(1, 0): same}), predictions)
    assert torch.equal(seen[0], patterns[1][:, 0])
    torch.testing.assert_close(patterns[1].sum(-1), torch.ones(3, 2, 12))
    changed, changed_patterns = model(x, heads={(1, 0): silent}, return_patterns=True)
    assert not torch.allclose(changed, predictions)
    assert torch.equal(changed_patterns[1], patterns[1])  # f had a copy


# ---- train


def test_train_learns_one_retrieval_step(tmp_path):
    flags = "--layers 2 --width 32 --D 1 --N 2 --rotary qk --no-mlp --lr 1e-2 --batch 64"
    flags += f" --warmup 10 --steps 2000 --stop-below 0.2 --device cpu --out {tmp_path}/run"
    code, out, err = run_main(train, flags)
    assert code == 0 and "solved: True" in out, out + err

    # other sequences, with answers that are found by comparing symbols; their average has 0.5
    model, flags = train.load(tmp_path / "run")
    batch = data.make_batch(99, torch.arange(500), N=2, D=1, rotary="qk")
    answers = torch.stack([follow(tokens, 2, 1, 4) for tokens in batch.inputs])
    with train.precision(flags):
        assert (model(batch.inputs) - answers).square().mean() < 0.22


def train_until(step, arguments):
    """Train, with a signal to stop during the evaluation of this step."""
    flags, stopped = train.parse_flags(shlex.split(arguments)), []

    def print_row(flags, rows):
        if rows[-1]["step"] == step:
            stopped.append(2)

    with mock.patch.object(train, "print_row", print_row):
        assert not train.run_once(flags, stopped)


def test_train_resumes_a_stopped_run_to_the_same_bits(tmp_path, tiny_run):
    train_until(20, f"{TINY} --out {tmp_path}/run")
    assert not (tmp_path / "run/model.pt").exists()
    code, out, err = run_main(train, f"{TINY} --out {tmp_path}/run --resume")
    assert code == 0 and "resumed" in out, err
    for row, other in zip(train.read_log(tiny_run), train.read_log(tmp_path / "run"), strict=True):
        assert {**row, "seconds": 0} == {**other, "seconds": 0}
    weights = train.load(tmp_path / "run")[0].state_dict()
    for name, weight in train.load(tiny_run)[0].state_dict().items():
        assert torch.equal(weight, weights[name]), name


# ---- ablate


def planted(x, heads):
    """A model of two layers with one head each that solves N=4, D=1 by a circuit that was set by
    hand: in layer 0 each token notes the token before it, and in layer 1 it reads the tokens whose
    note is its own symbol."""
    symbols, T = x[..., :4], x.shape[1]
    before = torch.eye(T)[(torch.arange(T) - 1).clamp(min=0)].expand(len(x), T, T)
    noted = heads.get((0, 0), torch.matmul)(before, symbols)
    scores = -50 * torch.cdist(symbols, noted).square() + torch.full((T, T), -torch.inf).triu(1)
    scores[:, 1:, 0] = -torch.inf  # before the first token there is none, so it notes itself
    read = heads.get((1, 0), torch.matmul)(scores.softmax(-1), symbols)
    return read[:, -4:]


def address_and_values(x, heads):
    """A model of one layer with five heads that solves N=4, D=1: head 0 tells the query at which
    place its own 1a stands, heads 1 to 4 bring the values of all places; this one's is taken."""
    symbols, T, queries, keys = x[..., :4], x.shape[1], slice(8, 12), slice(0, 8, 2)
    itself = torch.eye(T).repeat(len(x), 1, 1)

    # head 0: to the token 1a of the same symbol, which brings its place, one-hot
    pattern = itself.clone()
    pattern[:, queries] = 0
    distance = torch.cdist(symbols[:, queries], symbols[:, keys])
    pattern[:, queries, keys] = (-50 * distance.square()).softmax(-1)
    places = torch.eye(T)[:, keys].expand(len(x), T, 4)
    own_place = heads.get((0, 0), torch.matmul)(pattern, places)[:, queries]

    # the others: to the token 1b of one place, whatever chain stands there
    answers = 0
    for place in range(4):
        pattern = itself.clone()
        pattern[:, queries] = torch.eye(T)[2 * place + 1]
        value = heads.get((0, 1 + place), torch.matmul)(pattern, symbols)[:, queries]
        answers = answers + own_place[:, :, place, None] * value
    return answers


@pytest.mark.parametrize(
    "model, layers, heads, circuit",
    [
        (planted, 2, 1, ["L0H0: 1b -> 1a", "L1H0: q -> 1b"]),
        # a star: the query reads the tokens 1b of all chains
        (address_and_values, 1, 5, ["L0H0: q -> 1a", *(f"L0H{h}: q -> 1b*" for h in range(1, 5))]),
    ],
)
def test_ablate_finds_a_planted_circuit_and_no_other_is_faithful(model, layers, heads, circuit):
    flags = f"--layers {layers} --heads {heads} --D 1 --device cpu --dtype float32"
    flags = train.parse_flags(flags.split())
    report = ablate.find_circuit(model, flags)
    paths = {*ablate.paths_in(report)}
    assert sorted(map(str, paths)) == circuit, report["verdict"]
    assert report["verdict"] == "validated under both ablations"

    # without a path, or with another in its place: of another head, or of the reader to itself
    batch = train.sequences(flags, data.held_out("circuits", 64))
    patched = ablate.PatchedModel(model, flags, batch)
    for path in paths:
        elsewhere = path._replace(layer=(path.layer + 1) % layers, head=(path.head + 1) % heads)
        for wrong in [], [elsewhere], [path._replace(read=path.reader)]:
            assert patched.circuit(paths - {path} | {*wrong}).mean() > 0.05


def test_ablate_keeps_what_transformer_a_needs():
    model, flags = train.load(HERE / "results/A")
    paths = {*ablate.paths_in(ablate.read_report(HERE / "results/A"))}
    batch = train.sequences(flags, data.held_out("circuits", 64))
    reference = ablate.Reference(model, flags, n=128)
    patched = ablate.PatchedModel(model, flags, batch, reference)
    for by in ablate.MEAN, ablate.ANOTHER:
        assert patched.circuit(paths, by).mean((0, 1)).max() < 0.03
        assert patched.circuit([], by).mean((0, 1)).min() > 0.5
    for path in paths:
        assert patched.circuit(paths - {path}, ablate.ANOTHER).mean((0, 1)).max() > 0.04


# ---- analyze and sweep


def test_analyze_draws_every_figure(tiny_run, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in "config.json", "log.jsonl", "model.pt", "ckpt":
        (run / name).symlink_to(tiny_run / name)
    assert "run python ablate.py" in run_main(analyze, str(run))[1]
    report = dict(validated=True, verdict="validated under both ablations", attended=[], paths=[])
    for path in ablate.Path(0, 0, "1b", "1a"), ablate.Path(1, 0, "q", "1b*"):
        report["paths"].append(dict(path._asdict(), attention=0.5))
    report |= dict(sequences=9, path_sequences=9, mean=dict(x_1=[0.5, 0.4, 0.6]))
    (run / "circuit.json").write_text(json.dumps(report))
    assert run_main(analyze, str(run))[0] == 0
    assert len(json.loads((run / "emergence.json").read_text())["steps"]) == 3
    for name in analyze.FIGURES:
        assert is_png(run / name), name


def test_sweep_trains_its_grid_and_draws_figure_4(tmp_path):
    from distributed import Client

    # the worker is a thread of this process here, which needs no second import of torch
    here = Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=None)
    grid = f"{TINY} --steps 10 --layers 1 2 2 --seeds 1 --out {tmp_path}"  # the last flag counts
    with mock.patch.object(sweep, "connect", return_value=here):
        code, _, err = run_main(sweep, grid)
    assert code == 0, err
    table = sweep.read_table(tmp_path / "results.jsonl").values()
    assert sorted(row["layers"] for row in table) == [1, 2]
    assert all(row["error"] is None and row["ended"] == 10 and row["x_1"] > 0 for row in table)
    assert is_png(tmp_path / "figure4.png")
    code, _, err = run_main(sweep, f"{grid} --eval-every 3")
    assert code == 2 and "has other eval_every or save_every" in err


# ---- all stages


def test_a_mistake_gets_one_line(tiny_run, tmp_path):
    for module, arguments, says in (
        (data, "--K 3", "even"),
        (train, "--K 3", "must be even"),
        (train, "--lr nan", "--lr: must be from 0"),
        (train, "--device cuda:99", "--device cuda:99"),
        (train, "--heads 3", "divisible by --heads 3"),
        (train, "--lay 3", "unrecognized"),
        (train, f"{TINY} --out {tiny_run}", "add --resume"),
        (train, f"{TINY} --steps 3 --out {tiny_run}", "steps 40, not 3"),
        (train, f"{TINY} --heads 4 --init {tiny_run}", "a model of another shape"),
        (train, f"{TINY} --lr 1e9 --clip 0 --out {tmp_path}/blown", "the loss is not finite"),
        (ablate, f"{tmp_path}", "no run directory"),
        (ablate, f"{tiny_run} --threshold 2", "--threshold: must be"),
        (analyze, f"{tmp_path}", "no run directory"),
        (sweep, "", "give either a --preset"),
        (sweep, "--layers 1 --seed 3", "leave out --seed"),
        (sweep, "--preset laptop --device cuda:99", "--device cuda:99"),
        (sweep, "--layers 1 --worker 3", "unrecognized"),
        (sweep, "--layers 1 --workers 0", "--workers: must be from 1"),
    ):
        code, _, err = run_main(module, arguments)
        assert code == 2 and says in err and err.count("\n") == 1, (module, arguments, err)


def test_a_stage_imports_only_earlier_stages():
    for number, stage in enumerate(STAGES):
        text = (HERE / f"{stage}.py").read_text()
        imported = {*re.findall(r"^ *(?:import|from) (\w+)", text, re.M)}
        local = {path.stem for path in HERE.glob("*.py")} | {"extras", "tests"}
        assert imported & local <= {*STAGES[:number]}, stage


def main():
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    options = [word for word in sys.argv[1:] if word not in (*words, "--all", "--slow")]  # pytest's
    command = ["-q", "--durations=5", __file__, "-k", " or ".join(words), *options]
    if {"--all", "--slow"} & {*sys.argv}:
        command += [str(HERE / "tests"), "-n", "auto"]
        command += [] if "--slow" in sys.argv else ["-m", "not slow"]
    sys.exit(pytest.main(command))


if __name__ == "__main__":
    main()
