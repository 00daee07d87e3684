"""Studies of many runs, over run directories and rows made by hand."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from data import chain, held_out
from extras import studies
from extras.studies import circuits, cleaning, curriculum, depth, order, theory, waiting
from tests.common import HERE, assert_refused, contents, run_main
from train import SETTINGS


def write_run(run, flags="", **losses):
    """Write a run directory of these flags; losses: those of each symbol, every 100 steps."""
    run.mkdir(parents=True)
    flags = train.parse_flags(["--device", "cpu", *flags.split()])
    settings = {name: getattr(flags, name) for name in SETTINGS}
    (run / "config.json").write_text(json.dumps(settings))
    rows = []
    for number, values in enumerate(zip(*losses.values(), strict=True)):
        row = dict(step=100 * number, seconds=1, val=sum(values) / len(values))
        rows.append(json.dumps(row | dict(zip(losses, values, strict=True))))
    (run / "log.jsonl").write_text("\n".join(rows) + "\n")
    return run


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn."""
    drawn = []
    monkeypatch.setattr(train, "save_figure", lambda figure, file: drawn.append(figure))
    return drawn


FALLING = dict(x_1=[1, 1, 0, 0, 0], x_2=[1, 1, 1, 0, 0])  # below 0.5 at steps 150 and 250


# ---- what studies share


def test_runs_of_one_config_differ_in_the_seed_alone(tmp_path):
    def config_of(*flags):
        return studies.config_of(train.parse_flags(["--device", "cpu", *flags]))

    assert config_of() == config_of("--seed", "3", "--dtype", "float32", "--eval-every", "7") == ()
    assert config_of("--no-ic", "--K", "2") == ("K=2", "ic=False")
    runs = [
        write_run(tmp_path / "b", "--D 2 --steps 100 --seed 1", **FALLING),
        write_run(tmp_path / "a", "--D 2 --steps 100", **FALLING),
        write_run(tmp_path / "c", "--D 2 --steps 100 --lr 2e-3", **FALLING),
    ]
    groups = studies.group_by_config(map(studies.load_row, runs))
    names = {name: [row["run"].name for row in group] for name, group in groups.items()}
    assert names == {"D=2, steps=100": ["a", "b"], "lr=0.002": ["c"]}


def test_a_run_named_twice_counts_once_and_nothing_is_written_beside_it(tmp_path):
    def main():
        studies.command(order.__file__, "", order.tables, order.draw)

    study, out = SimpleNamespace(__file__=order.__file__, main=main), tmp_path / "out"
    run = write_run(tmp_path / "runs" / "a", "--D 2", **FALLING)
    before = contents(run.parent)
    code, printed, err = run_main(study, run, run.parent / "." / "a", "--out", out)
    assert code == 0 and "| Muon, appended encoding, D=2 | 1 |" in printed, (printed, err)
    assert contents(run.parent) == before and [file.name for file in out.iterdir()] == ["order.png"]
    assert_refused(study, tmp_path, says="is no run directory")


def test_two_values_are_printed_as_two_values():
    assert studies.spread([30, 20]) == "20 and 30" and studies.spread([7]) == "7"
    assert studies.spread([1, 2, 9]) == "2 (1\N{EN DASH}9)"
    assert studies.share([True, False, None]) == "1 of 2" and studies.share([None]) == ""
    assert studies.share([True] * 7 + [False] * 2) == "7 of 9 [0.45, 0.94]"


# ---- order


def write_emergence(run, *paths):
    """Write emergence.json with a checkpoint for each row of the log; paths: (layer, source,
    target, step at which its attention is 1, loss of x_1 without it)."""
    log, rows = train.read_log(run), []
    steps = [row["step"] for row in log]
    losses = {name: [row[name] for row in log] for name in ("x_1", "x_2")}
    for layer, source, target, emerged, loss in paths:
        mean = [float(step >= emerged) for step in steps]
        row = dict(layer=layer, head=0, reader=source, read=target, mean=mean, low=mean)
        without = dict(x_1=[loss] * len(steps), x_2=losses["x_2"])
        rows.append(row | dict(high=mean, hits=mean, without=without))
    kept = dict(sequences=1, steps=steps, losses=losses, paths=rows, heads=[])
    (run / "emergence.json").write_text(json.dumps(kept))


def test_which_paths_came_first_and_which_x_1_needs(tmp_path, figures):
    runs = [write_run(tmp_path / f"s{seed}", f"--D 2 --seed {seed}", **FALLING) for seed in (0, 1)]
    runs.append(
        write_run(tmp_path / "s2", "--D 2 --seed 2", x_1=[1, 1, 1, 0, 0], x_2=[1, 0, 0, 0, 0])
    )
    lower, upper, other = (1, "1b", "1a", 100, 0.9), (2, "q", "1b", 200, 0.6), (3, "q", "2b", 300)
    write_emergence(runs[0], lower, upper, (*other, 0.03))
    write_emergence(
        runs[1], lower, (2, "q", "1b", 200, 0.4), (*other, 0.02), (4, "q", "1b", 900, 0)
    )
    rows = order.load_rows_with_paths(runs)
    table = order.induction_table({"two of three": rows}).splitlines()
    assert table[2] == "| two of three | 0 of 2 | 2 of 2 | 1 of 2 | 2 of 2 | 0.030 |"
    first, _, last = order.runs_table(rows).splitlines()[2:]
    assert first.endswith("| L1H0: 1b -> 1a: 50; L2H0: q -> 1b: 150; L3H0: q -> 2b: 250 |")
    assert last == "| s2 | 250, 50 | 400 | x_1 0, x_2 0 | 0.0000 |  |"
    table = order.order_table(rows).splitlines()
    gaps, ends = "100 (-200\N{EN DASH}100)", "400 (400\N{EN DASH}400)"
    assert (
        table[2] == f"| Muon, appended encoding, D=2 | 3 | {gaps} | {ends} | 2 of 3 [0.21, 0.94] |"
    )

    # the figures: a mark for each step, in the line of its run
    q_to_1b, b_to_a = "attention from q to 1b", "attention from 1b to 1a"
    order.draw(runs, tmp_path)
    marks = {
        mark.get_label(): mark.get_offsets().tolist() for mark in figures[0].axes[0].collections
    }
    assert marks == {
        "$x_{1}$ learned: its loss passes below 0.5 (n = 3)": [[150, 1], [150, 2], [250, 3]],
        "$x_{2}$ learned: its loss passes below 0.5 (n = 3)": [[250, 1], [250, 2], [50, 3]],
        f"induction head: {q_to_1b} passes above 0.5 (n = 2)": [[150, 1], [150, 2]],
        f"previous-token head: {b_to_a} passes above 0.5 (n = 2)": [[50, 1], [50, 2]],
    }


@pytest.mark.slow
def test_x_1_of_transformer_a_needs_both_heads_once_it_is_learned(tmp_path, monkeypatch, figures):
    """Checkpoints: untrained weights, then those of A, whose circuit is known."""
    A, run, out = HERE / "results/A", tmp_path / "runs/a/s0", tmp_path / "results/figures"
    for folder in (run / "ckpt", out):
        folder.mkdir(parents=True)
    for name in ("config.json", "log.jsonl"):
        shutil.copy(A / name, run)
    torch.save(train.build(train.read_flags(A)).state_dict(), run / "ckpt/000000.pt")
    shutil.copy(A / "model.pt", run / "ckpt/000010.pt")
    order.draw([run], out)
    untrained, trained = json.loads(Path(out / "induction.jsonl", lines=True).read_text())
    assert [(row["run"], row["step"]) for row in (untrained, trained)] == [
        ("a/s0", 0),
        ("a/s0", 10),
    ]
    assert untrained["loss"] > 0.9 and max(untrained["kinds"].values())[0] < 0.1
    assert order.measure_run(run, whole=False) == [trained]

    # a token reads those before it: 21 of the 42 pairs of two of the seven roles
    kinds = dict(trained["kinds"])
    assert len(kinds) == 21 and "1a -> 1b" not in kinds and trained["loss"] < 0.02
    attention = kinds["q -> 2b"][1]
    query, previous = kinds.pop("q -> 1b")[0], kinds.pop("1b -> 1a")[0]
    other = max(rise for rise, _ in kinds.values())
    assert order.rises_of(trained) == (query, previous, other)
    assert min(query, previous) > 0.5 and other < 0.2

    # the attention of the head that attends most, token by token
    model, flags = train.load(A)
    batch = train.sequences(flags, held_out("emergence", 64))
    _, layers = model(batch.inputs, return_patterns=True)
    q, target = (flags.problem.names.index(name) for name in ("q", "2b"))
    means = []
    for pattern in layers:
        given = [
            pattern[b, 0, chain[q], chain[target]].item()
            for b, chains in enumerate(batch.positions.tolist())
            for chain in chains
        ]
        means.append(sum(given) / len(given))
    assert attention == pytest.approx(max(means), abs=0.01)

    monkeypatch.chdir(tmp_path)
    (first,) = order.load_first_learned()
    assert first == trained and order.is_lost(first) and not order.is_lost(first | dict(loss=-1))
    assert [len(axes.lines) for axes in figures[1].axes] == [3, 5]  # the last: x_1 is learned


def test_all_committed_runs_count_once_per_config_and_seed(tmp_path, monkeypatch):
    """Crossings at 150 and 250 are told apart by evaluations 100 steps apart, not 400."""
    late, one = dict(x_1=[1, 1, 0], x_2=[1, 0, 0]), dict(x_1=[1, 0], x_2=[1, 1])
    for name, flags, losses in (
        ("a", "--eval-every 100", FALLING),
        ("runs/again/a", "--eval-every 100", FALLING),
        ("runs/b/s1", "--seed 1 --eval-every 400", FALLING),
        ("runs/b/s2", "--seed 2 --eval-every 100", late),
        ("runs/b/s3", "--seed 3", one),
        ("runs/some/s0", "--targets 1", dict(x_1=[1, 0])),
        ("runs/alone/s0", "--no-ic", dict(x_2=[1, 1])),
    ):
        write_run(tmp_path / "results" / name, f"--D 2 {flags}", **losses)
    monkeypatch.chdir(tmp_path)
    counts = dict(several=3, in_order=2, resolved=2, alone=1, above=1)
    assert order.count_all() == counts


# ---- cleaning


def test_what_weight_decay_leaves(tmp_path):
    """zero_rows.jsonl is read where circuit.json has no test."""
    flags = train.parse_flags("--weight-decay 0.5 --lr 0.01 --warmup 0 --decay 0".split())
    assert math.isclose(cleaning.e_folds(flags, 10), 0.05)
    runs = [
        write_run(tmp_path / f"s{seed}", f"--D 2 --seed {seed}", **FALLING) for seed in range(3)
    ]
    for run in runs[:2]:
        train.write_rows(run / "zero_rows.jsonl", [dict(mse=0.2), dict(mse=0.1)])
    (runs[0] / "circuit.json").write_text(json.dumps(dict(paper=dict(held=0.03))))
    row = cleaning.folds_table(runs).splitlines()[2]
    assert row.startswith("| muon, --rotary input, width 128 | 0.0")
    assert row.endswith(" | 3 of 3 | 0.000 | 1 of 2 | 0.030 to 0.100 |"), row

    lost = write_run(tmp_path / "run", "--D 2", x_1=[1, 1, 0, 0, 1.8, 0], x_2=[1, 1, 1, 0, 0, 0])
    row = cleaning.stability_table([lost]).splitlines()[2]
    assert row == "| run | 500 | 150, 250 | 2 of 6 | 1 | 0.90 | 0.000 |"


# ---- curriculum


def test_target_symbols_and_stages_are_compared(tmp_path):
    first = write_run(tmp_path / "first", "--targets 1", x_1=[1, 0.6, 0.4, 0.1])
    staged = f"--targets 1 2 --init {first}"
    runs = [
        write_run(tmp_path / "a", "--targets 1 3", x_1=[1, 0.8, 0.2], x_3=[1, 0.9, 0.8]),
        write_run(tmp_path / "b", "--targets 1 3 --seed 1", x_1=[1, 0.4, 0.2], x_3=[1, 0.6, 0.1]),
        write_run(tmp_path / "c", staged, x_1=[0.1, 0.1], x_2=[1, 0.0]),
        write_run(tmp_path / "d", f"--init {tmp_path / 'c'}", x_1=[0.1], x_2=[0.1], x_3=[1]),
    ]
    assert curriculum.tables(runs).splitlines()[2:] == [
        "| x_1, x_3 | 2 of 2, step 83 and 150 |  | 1 of 2, step 120 |",
        "| x_1; then x_1, x_2 | 1 of 1, step 150 | 1 of 1, step 350 |  |",
        "| x_1; then x_1, x_2; then x_1, x_2, x_3 | 1 of 1, step 150 | 1 of 1, step 350 | 0 of 1 |",
    ]
    assert curriculum.learned_despite_gap(runs) == {2: [False, True]}


# ---- depth


def test_runs_are_counted_beside_the_depth_law(tmp_path, figures):
    def row(run, layers, *losses, circuit="", seed=0):
        row = dict(task="chain", N=4, D=3, causal=True, layers=layers, seed=seed, circuit=circuit)
        symbols = {f"x_{k}": loss for k, loss in enumerate(losses, 1)}
        steps = {
            f"x_{k}_learned": 10 * k if loss < 0.5 else None for k, loss in enumerate(losses, 1)
        }
        return row | dict(run=run, steps=100, **symbols, **steps)

    rows = [
        row("nothing is allowed", 1, 0.9, 0.9, 0.9),
        row("below the limit", 2, 0.9, 0.9, 0.9, seed=1),
        row("at the limit", 2, 0.1, 0.9, 0.9),
        row("beyond", 2, 0.1, 0.1, 0.9, seed=2),
        row("deep enough", 3, 0.1, 0.1, 0.1),
    ]
    assert depth.too_shallow(rows) == (4, 2, ["beyond"])
    assert depth.least_depths(rows, 1) == [2, math.inf, 2]
    assert depth.least_depths(rows, 2) == [3, math.inf, 2]
    assert depth.count_learners(rows)[1:] == [
        "1 layers, 1 runs: nothing",
        "2 layers, 3 runs: x_1 2 (10), x_2 1 (20)",
        "3 layers, 1 runs: x_1 1 (10), x_2 1 (20), x_3 1 (30)",
    ]
    frozen = [dict(row, circuit="minimal") for row in rows]
    assert depth.count_exact(rows + frozen, True) == "4 of 9"  # seed 0 alone, and x_1 of seed 2


# ---- circuits


def test_in_one_layer_a_free_head_is_the_full_model_and_only_queries_count(tmp_path):
    run = write_run(tmp_path / "run", "--layers 1 --width 16 --qk-std 1", **FALLING)
    torch.manual_seed(0)
    model = train.untrained(train.read_flags(run))
    model.blocks[0].out.weight.data *= 50  # so that it matters what the head reads
    train.write_tensors(run / "model.pt", model.state_dict())
    (run / "circuit.json").write_text('{"paths": []}')
    row, (model, flags) = circuits.free_heads(run), train.load(run)
    full = max(train.evaluate(model, flags, "validate", 256))
    assert row["at_queries"] == pytest.approx(full, 1e-4)
    assert row["free"]["L0H0"] == pytest.approx(full, 1e-4) != row["circuit"]

    # the four queries are the tokens 24 to 27
    batch = train.sequences(flags, held_out("validate", 256))
    pattern = model(batch.inputs, return_patterns=True)[1][0][:, 0].mean(0)
    pairs = [(i, j) for i in range(24, 28) for j in range(24, 28) if i != j]
    expected = sum(pattern[pair] for pair in pairs).item() / 4
    assert row["other_queries"] == pytest.approx(expected, 1e-4)


# ---- waiting


def test_the_other_tasks_of_the_waiting_study():
    """Read from step 1 on; and after pairs that hold no symbol of a chain. Roles: q to 2b."""
    assert [role.block for role in chain(4, 2).roles] == [2, 1, 1, 0, 0]
    assert [role.block for role in waiting.first_step_first(4, 2).roles] == [2, 0, 0, 1, 1]
    task = waiting.padded(4, 1)
    assert [role.symbol for role in task.roles] == [0, 0, 1, -1, -1, -1, -1, -1, -1]
    assert task.T == 36 and task.plateaus == chain(4, 1).plateaus


def test_the_previous_token_head_is_frozen_alone():
    names = chain(4, 3).names

    def frozen(circuit):
        flags = train.parse_flags(f"--layers 4 --circuit {circuit}".split())
        paths = theory.frozen_paths(flags)
        return {(path.layer, *(names[place.role] for place in path[2:])) for path in paths}

    assert frozen("previous") == {(0, f"{k}b", f"{k}a") for k in (1, 2, 3)} < frozen("minimal")


def test_the_terms_of_a_planted_plateau_and_its_forecast():
    """Flat at 0.0005 until step 100, then doubled every 20 steps; learned 50 steps after 0.1."""
    steps = [*range(0, 400, 10)]
    excess = [min(1, 0.0005 * 2 ** (max(0, step - 100) / 20)) for step in steps]
    row = dict(steps=steps, excess=excess, plateau=310)
    fit = waiting.terms(row)
    assert [round(fit[name], 4) for name in ("delay", "first", "doubling")] == [100, 0.0005, 20]
    assert fit["rest"] == 50 and fit["r2"] > 0.999 > fit["r2_power"]
    assert abs(waiting.forecast(row, 200) - (100 + 20 * math.log2(1 / 0.0005))) < 1
    assert waiting.forecast(row, 40) is None  # too few steps
    assert waiting.terms(row | dict(excess=[0.01] * 40)) is None


def test_growth_is_measured_once_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        waiting,
        "SMALL",
        "--layers 2 --heads 2 --width 16 --steps 20 --batch 8 --D 1 "
        "--ema 0 --save-every 10 --dtype float32 --targets 1",
    )
    monkeypatch.setattr(waiting, "POINTS", {"base": ""})
    monkeypatch.setattr(waiting, "MAIN", {})
    monkeypatch.setattr(waiting, "TRANSPLANTS", {})
    waiting.grow(tmp_path, 1)
    rows = waiting.load_rows(tmp_path)
    assert [row["setting"] for row in rows] == list(waiting.SETTINGS)
    assert all(row["steps"] == [0, 10, 20] and len(row["excess"]) == 3 for row in rows)
    waiting.grow(tmp_path, 1)
    assert waiting.load_rows(tmp_path) == rows
    waiting.draw_growth(rows, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000
