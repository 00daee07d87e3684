"""Several runs: what came first in each, counted over hand-made runs, and the picture of it."""

import json

from parts import emergence, runs
from parts.circuit import Path

import matplotlib.pyplot as plt
import pytest

import train
from data import chain
from studies import compare, order
from tests.common import assert_refused, run_main
from tests.other_tasks import MIXED, TASKS, TRIPLES


LOWER, UPPER, OTHER = (1, 1, "1b", "1a"), (2, 1, "q", "1b"), (3, 1, "q", "2b")
CERTIFICATE = dict(
    grade="literal",
    fill="zero",
    candidates=7,
    sufficient=True,
    first_head_uniform=dict(mse=0.07),
    removals=[dict(frozen=dict(mse=mse)) for mse in (0.02, 0.06, 0.3)],
    removals_above_threshold=2,
    removals_at_the_papers_least=1,
    controls=dict(random=0.7, complement=None),
    predictions_right=2,
    replaced=dict(mse=0.02, low=0.01, high=0.03, partial=[0.02, 0.02]),
    paths=3,
    least_paths=4,
    layers_with_paths=3,
    least_layers=3,
    first_useful_layer_is_previous_token=True,
)


def run_of(folder, name, emerges, needed=0.8, learned=(30, 50), **flags):
    """A run directory made by hand. emerges: {path: the step at which its attention passes 0.5};
    learned: when each symbol does; needed: the loss of x_2 without each path. Measured every ten
    steps."""
    run, steps = folder / name, range(0, 101, 10)
    run.mkdir()
    config = train.parse_flags(["--D", "2", "--device", "cpu"]) | flags | dict(out="")
    (run / "config.json").write_text(json.dumps(config))
    rows = []
    for step in steps:
        symbols = {f"x_{k}": 1 - (step >= end) for k, end in enumerate(learned, 1)}
        rows.append(json.dumps(dict(step=step, val=0.1) | symbols))
    (run / "log.jsonl").write_text("\n".join(rows))

    # its circuit, and the attention of its paths
    heads = []
    for layer, head, source, target in emerges:
        path = dict(source=source, target=target, attention=0.9)
        heads.append(dict(layer=layer, head=head, mechanism=[path]))
    (run / "circuit.json").write_text(json.dumps(CERTIFICATE | dict(heads=heads)))
    rows = []
    for step in steps:
        paths = []
        for emerged in emerges.values():
            mean = 0.5 + 0.02 * min(20, max(-20, step - emerged))
            rest = dict(low=mean, high=mean, hits=mean)
            paths.append(dict(mean=mean, without=[0.9, needed]) | rest)
        rows.append(dict(step=step, losses=[0.0, 0.0], paths=paths))
    kept = dict(sequences=1, paths=list(emerges), rows=rows)
    (run / "emergence.json").write_text(json.dumps(kept))
    return run


# ---- tables


def test_what_emerged_first_is_counted(tmp_path):
    """Four runs by hand: an induction head first and needed later, one that nothing needs, another
    head, a close finish."""
    folders = [
        run_of(tmp_path, "first", {LOWER: 5, UPPER: 15, OTHER: 55}),
        run_of(tmp_path, "spare", {LOWER: 35, UPPER: 15, OTHER: 55}, needed=0.2),
        run_of(tmp_path, "late", {LOWER: 65, UPPER: 55, OTHER: 15}),
        run_of(tmp_path, "close", {LOWER: 5, UPPER: 12, OTHER: 17}),
    ]
    code, out, err = run_main(compare, *folders)
    assert code == 0, err
    assert (tmp_path / "order.png").stat().st_size > 1000 and f"{tmp_path}/order.png" in out
    certificate = "literal (zero) | 0.0200 [0.0100, 0.0300] | 0.070 | 3 (4) in 3 (3) | "
    certificate += "0.020 to 0.30 (2, 1 of 3) | 0.70 | 2 of 3 | yes"
    first = "layer 1: 1b -> 1a at 5, layer 2: q -> 1b at 15, layer 3: q -> 2b at 55"
    assert f"| first | 0.0051 | 100 | 0.1000 | 7 | {certificate} | 25, 45 | {first} |" in out, out
    assert "| 25, 45 | layer 3: q -> 2b at 15 |" in out, out
    head = "an induction head first (q -> 1b, with 1b -> 1a below, before any other)"
    for claim in (
        "a literal circuit | 4 of 4 [0.51, 1.00]",
        "in the least number of layers | 4 of 4",
        "with the least number of paths | 0 of 4",
        "when the last symbol is learned | 3 of 4",
        "cross 0.5 in this order | 4 of 4",
        f"{head} | 3 of 4",
        "a checkpoint stands between it and the next path | 2 of 3",
        "its 1b -> 1a passes 0.5 before its q -> 1b | 2 of 3",
        "a later symbol is lost | 2 of 3",
        "different circuits, by the roles of their paths in order | 1",
        "from x_1 to x_2, median (range) | 20 (20 to 20), n = 4",
    ):
        assert claim in out, (claim, out)


def test_what_is_not_known_is_not_counted(tmp_path):
    folders = [run_of(tmp_path, name, {LOWER: 5, UPPER: 15}) for name in ("a", "b", "c", "d")]
    (folders[1] / "circuit.json").unlink()
    (folders[2] / "circuit.json").write_text(json.dumps(dict(grade=None)))
    (folders[3] / "emergence.json").unlink()
    out = run_main(compare, *folders)[1]
    rows = out.splitlines()[:6]
    assert {row.count("|") for row in rows} == {len(compare.COLUMNS) + 1}
    assert rows[0] == f"| {' | '.join(compare.COLUMNS)} |"
    assert rows[3] == f"| b | 0.0051 | 100 | 0.1000 |  | not looked for |{'  |' * 7} 25, 45 |  |"
    assert rows[4] == f"| c | 0.0051 | 100 | 0.1000 | not counted | none |{'  |' * 7} 25, 45 |  |"
    assert rows[5].startswith("| d | 0.0051 | 100 | 0.1000 | 7 | literal (zero) | ")
    assert rows[5].endswith(" | 2 of 3 | yes | 25, 45 |  |")
    assert "a literal circuit | 2 of 3" in out, out
    assert (
        "an induction head first (q -> 1b, with 1b -> 1a below, before any other) | 1 of 1" in out
    )
    assert "between it and the next path | not measured" in out


def test_the_figure_of_cleaning_needs_other_decays(tmp_path):
    folders = [run_of(tmp_path, name, {LOWER: 5}) for name in "ab"]
    assert "cleaning.png" not in run_main(compare, *folders)[1]
    other = run_of(tmp_path, "c", {LOWER: 5}, weight_decay=1.0, optimizer="adamw")
    assert f"{tmp_path}/cleaning.png" in run_main(compare, *folders, other)[1]
    assert (tmp_path / "cleaning.png").stat().st_size > 1000


def test_kinds_are_apart_and_waits_of_unequal_chains_are_kept(tmp_path):
    folders = [
        run_of(tmp_path, "appended", {LOWER: 5}, D=3, learned=(30, 50, 80)),
        run_of(tmp_path, "short", {LOWER: 5}),
        run_of(tmp_path, "turned", {LOWER: 5}, rotary="qk", learned=(50, 30)),
    ]
    for folder in folders:
        (folder / "emergence.json").unlink()
    out = run_main(compare, *folders)[1]
    assert "muon, --rotary input: x_1, x_2, ... cross 0.5 in this order | 2 of 2" in out, out
    assert "muon, --rotary qk: x_1, x_2, ... cross 0.5 in this order | 0 of 1" in out
    kind = "muon, --rotary input"
    assert f"{kind}: steps from x_1 to x_2, median (range) | 20 (20 to 20), n = 2" in out
    assert f"{kind}: steps from x_2 to x_3, median (range) | 30 (30 to 30), n = 1" in out
    assert "--rotary qk: steps" not in out


def test_what_cannot_be_compared_is_refused(tmp_path, monkeypatch):
    folder = run_of(tmp_path, "run", {LOWER: 5})
    assert_refused(compare, folder, tmp_path, says="is no run directory")
    other = run_of(tmp_path, "other", {LOWER: 5}, N=3)
    tasks = {4: chain(4, 2), 3: TRIPLES}
    monkeypatch.setattr(runs, "task_of", lambda config: tasks[config["N"]])
    assert_refused(compare, folder, other, says="of tasks with other roles: compare them apart")
    (folder / "circuit.json").write_text(json.dumps(dict(rows=[], heads=[])))
    assert_refused(
        compare, folder, says=f"{folder}/circuit.json is of an older form: run ablate.py"
    )
    (folder / "circuit.json").write_text(json.dumps(dict(grade="literal", removals=[])))
    assert_refused(compare, folder, says="is of an older form: run ablate.py")
    assert not (tmp_path / "order.png").exists()


# ---- what came first


def test_in_order():
    assert order.in_order([10, 20, 30]) and order.in_order([10, 20, None])
    assert order.in_order([20, 10, 30]) is False and order.in_order([10, None, 30]) is False
    assert order.in_order([10, None]) is None


def test_the_induction_head_of_any_task():
    assert order.induction_names(chain(4, 3)) == ("q -> 1b", "1b -> 1a")
    assert order.induction_names(MIXED) == ("q -> 1b", "1b -> 1a")
    upper, lower = order.induction_names(TRIPLES)
    assert (upper, lower) == ("q -> 1b or q -> 1c", "1b -> 1a or 1c -> 1a")

    # only with the lower path of its own, in a layer below
    read_b, read_c = Path(0, 0, 2, 1), Path(1, 0, 3, 1)
    find_c, find_a = Path(1, 0, 0, 3), Path(0, 0, 0, 1)
    when = {find_a: 5, read_c: 10, read_b: 20, find_c: 30}
    assert order.induction_head(when, TRIPLES) == [find_c, None]
    later = find_c._replace(layer=2)
    assert order.induction_head(when | {later: 40}, TRIPLES) == [find_c, None]
    assert order.induction_head({read_c: 10, later: 40}, TRIPLES) == [later, read_c]
    assert order.induction_head({find_a: 5, read_b: 20}, TRIPLES) == [None, None]


@pytest.mark.parametrize("name", TASKS)
def test_paths_between_slots_of_any_task(name):
    """Of all paths, the induction head is the first between slots; paths inside one are not."""
    task = TASKS[name]
    value, last = 3 if name == "triples" else 2, len(task.roles) - 1
    paths = [Path(0, 0, value, 1), Path(0, 0, last, last - 1), Path(1, 0, 0, value)]
    histories = {}
    for path, mean in zip(paths, (0.9, 0.8, 0.7), strict=True):
        without = dict(x_1=[1, 0.9], x_2=[1, 0.9])
        histories[path] = emergence.History([0, mean], [0, 0], [0, 0], [0, 0], without)
    losses = dict(x_1=[1, 0.1], x_2=[1, 0.1])
    seen = emergence.Emergence(1, [0, 10], losses, histories)
    found = order.what_came_first(seen, dict(x_1=5, x_2=9), task)
    assert list(found["first_paths"]) == [paths[0], paths[2]]
    assert found["induction_head_first"] and found["lower_before_upper"]
    assert found["later_symbol_lost"] and "checkpoint_between" not in found
    # 1c -> 1a of the triples skips 1b; 2a of the mixed task stands behind 2b
    assert found["previous_token_first"] == (name == "chain")


def test_an_induction_head_without_its_lower_path_is_not_first():
    lower, upper, other = Path(0, 0, 2, 1), Path(1, 0, 0, 2), Path(2, 0, 0, 4)
    for means in ([0, 0, 0.9], [0, 0.4, 0.45]):  # after the other path, and never
        without = dict(x_1=[1, 1, 1], x_2=[1, 1, 1])
        curves = {lower: means, upper: [0, 0.9, 0.9], other: [0, 0.6, 0.9]}
        histories = {}
        for path, curve in curves.items():
            histories[path] = emergence.History(curve, curve, curve, curve, without)
        seen = emergence.Emergence(1, [0, 10, 20], dict(x_1=[0] * 3, x_2=[0] * 3), histories)
        found = order.what_came_first(seen, dict(x_1=5, x_2=9), chain(4, 2))
        assert next(path for path in found["first_paths"] if path != lower) == upper
        assert found["induction_head_first"] is False and "lower_before_upper" not in found
        assert ("lower_step" in found) == (means[-1] > 0.5)


def test_heads_that_mattered_once():
    """Head 1 was needed for x_1 first and died; head 2 is needed to the end."""
    losses = dict(x_1=[1, 0.1, 0.0], x_2=[1, 1, 0.1])
    dead = dict(x_1=[1, 1.0, 0.04], x_2=[1, 1, 0.1])
    alive = dict(x_1=[1, 0.2, 1.0], x_2=[1, 1, 1.2])
    idle = dict(x_1=[1, 0.1, 0.0], x_2=[1, 1, 0.1])
    heads = {(0, 0): idle, (1, 0): dead, (2, 0): alive}
    seen = emergence.Emergence(1, [0, 10, 20], losses, {}, heads)
    found = order.what_heads_did(seen, {(2, 0)}, chain(4, 2))
    assert found == dict(first_heads_stay=False, no_head_died=False)
    seen = seen._replace(heads={(0, 0): idle, (2, 0): alive})
    assert order.what_heads_did(seen, {(2, 0)}, chain(4, 2)) == dict(
        first_heads_stay=True, no_head_died=True
    )
    assert order.what_heads_did(seen._replace(heads={}), {(2, 0)}, chain(4, 2)) == {}


# ---- the picture


def test_the_picture_shows_each_step_in_its_line(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(runs, "save_figure", lambda figure, file: figures.append(figure))
    folders = [
        run_of(tmp_path, "L2_s0", {LOWER: 5, UPPER: 15, OTHER: 55}),
        run_of(tmp_path, "L2_s1", {OTHER: 15}, learned=(30, 500)),
    ]
    alone = run_of(tmp_path, "L2_s2", {LOWER: 5}, D=3, ic=False, learned=(30, 50, 80))
    (alone / "circuit.json").unlink()
    log = [json.loads(line) for line in (alone / "log.jsonl").read_text().splitlines()]
    log = [json.dumps({name: row[name] for name in ("step", "val", "x_3")}) for row in log]
    (alone / "log.jsonl").write_text("\n".join(log))
    assert run_main(compare, *folders, alone)[0] == 0
    (axes,) = figures[0].axes
    marks = {mark.get_label(): mark.get_offsets().tolist() for mark in axes.collections}
    arrow = "\N{RIGHTWARDS ARROW}"
    assert marks == {
        "$x_{1}$ below 0.5 (n = 2)": [[25, 0], [25, 1]],
        "$x_{2}$ below 0.5 (n = 1)": [[45, 0]],
        "$x_{3}$ below 0.5 (n = 1)": [[75, 2]],
        f"1b {arrow} 1a attention above 0.5 (tick up) (n = 1)": [[5, 0]],
        f"q {arrow} 1b attention above 0.5 (tick down) (n = 1)": [[15, 0]],
    }
    assert [label.get_text() for label in axes.get_yticklabels()] == ["s0", "s1", "s2"]
    plt.close("all")


def test_without_a_symbol_learned_there_is_no_picture(tmp_path):
    folder = run_of(tmp_path, "run", {LOWER: 5}, learned=(500, 500))
    code, out, err = run_main(compare, folder)
    assert code == 0 and "never, never" in out and not (tmp_path / "order.png").exists(), err
