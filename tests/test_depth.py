"""The study of depth, on a model whose mechanism is known because its weights are a formula."""

import torch

import train
from extras.studies import depth, theory
from test_all import is_png


def test_interventions_find_the_address_and_the_memory(tmp_path, monkeypatch):
    """On theory.constructed(4), with a log of our own."""
    monkeypatch.setattr(depth, "ROWS", tmp_path / "rows.jsonl")
    run = tmp_path / "solved"
    run.mkdir()
    flags = "--layers 1 --heads 5 --head-size 16 --D 1 --dtype float32 --steps 300 --seed 7"
    train.open_run(train.parse_flags([*flags.split(), "--device", "cpu", "--out", str(run)]))
    log = [dict(step=100 * i, val=loss, x_1=loss) for i, loss in enumerate((0.9, 0.5, 0.0001), 1)]
    train.write_rows(run / "log.jsonl", log)
    train.write_tensors(run / "model.pt", theory.constructed(4).state_dict())
    depth.measure([run, tmp_path / "no run"])
    (row,) = train.read_rows(depth.ROWS)
    how = row["how"]
    assert row["x_1"] == 0.0001 and row["fell"] == 0.4999 and row["other"] == ""

    # what each head does, and reads
    kinds = [depth.kind_of(how, f"L0H{head}") for head in range(5)]
    assert kinds == ["place"] * 4 + ["content"] and how["address"] == ["L0H4"]
    assert [how["reads"][f"L0H{i}"].index(1.0) for i in range(4)] == [1, 3, 5, 7]
    assert how["own"]["L0H4"] > 0.99 > 0.8 > how["match"]["L0H4"] > 0.7
    assert how["spread"]["L0H0"] == 1.0 <= how["spread"]["L0H4"] < 1.1

    # an address of another sequence fetches the value of its slot, all else that sequence's value
    for swap in ("swap", "swap_rest"):
        new, old = how[swap]
        assert new < 0.01 and 1.8 < old < 2.2
    assert how["moved"][0] < 1e-3 < 1.8 < how["moved"][1] and how["moved_rest"][1] < 1e-3
    assert max(how["full"] + how["by_slot"]) < 1e-3 < 0.7 < how["mlp"][0][0]
    assert how["place_layers"][0][0] > 0.7 > 1e-3 > how["place_others"][0]

    # a run is measured once; the tables show it
    depth.ROWS.write_text(depth.ROWS.read_text().replace('"x_1": 0.0001', '"x_1": 0.25'))
    depth.measure([run])
    assert depth.diagram_table().splitlines()[-1] == "| 1 | 4 | x_1 |  | 0.250* |"
    assert len(depth.binding_table().splitlines()) == len(depth.gates_table().splitlines()) == 2
    assert "| solved | 0.000 | 1/4/0 | 1 3 5 7 (1.00) | 0.000 |" in depth.mechanism_table()
    lines = []
    depth.print_swaps(lines.append)
    depth.print_counts(lines.append)
    printed = "\n".join(lines)
    for said in (
        "1 models",
        "the new value is at most 0.00",
        "predicted in 1 of 1 cells,\nand not in none (layers/heads/N).",
        "1 passed it (see above), and 0 solved",
    ):
        assert said in printed
    depth.draw_address("solved", tmp_path / "address.png")
    assert is_png(tmp_path / "address.png")


def test_what_counts_as_reaching_and_as_passing_the_law():
    def row(layers, *losses):
        return dict(layers=layers, D=len(losses), threshold=0.5) | {
            f"x_{k}": loss for k, loss in enumerate(losses, 1)
        }

    assert not depth.passes(row(1, 0.6)) and depth.passes(row(1, 0.4))
    assert depth.reaches(row(1, 0.4)) is None
    assert depth.reaches(row(2, 0.1, 0.7)) and not depth.passes(row(2, 0.1, 0.7))
    assert not depth.reaches(row(2, 0.6, 0.7)) and depth.passes(row(2, 0.1, 0.3))
    assert not depth.passes(row(3, 0.1, 0.1, 0.1, 0.6)) and depth.passes(row(3, 0.1, 0.1, 0.1, 0.4))


def test_ablations_of_a_head():
    pattern, values = torch.rand(5, 6, 6), torch.rand(5, 6, 3)
    written = (pattern @ values).mean(0)
    torch.testing.assert_close(depth.by_place(pattern, values)[2], pattern.mean(0) @ values[2])
    torch.testing.assert_close(depth.mean_written(pattern, values), written.expand(5, 6, 3))
    torch.testing.assert_close(depth.from_the_next(pattern, values)[4], pattern[0] @ values[0])
