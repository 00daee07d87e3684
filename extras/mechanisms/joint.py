"""The memories of the bigram task learned jointly, or some frozen at first (Bietti's slides)."""

from extras.mechanisms import bigrams


def draw(results):
    """Plot the recall of each memory and the accuracy, all of them but the runs until step 50."""
    rows = [row for row in results["train_memories"] if row["until"] != 50]
    return bigrams.draw(dict(train_memories=rows), columns=3, width=3, height=2)


FROZEN = [([], 0)]
FROZEN += [(names, step) for step in (150, 50) for names in (["W_KQ2", "W_KQ1"], ["W_OV2"])]
ROWS = [dict(triggers="random", steps=300, frozen=names, until=step) for names, step in FROZEN]
TASKS = [(bigrams.train_memories, 3, ROWS, bigrams.memory_table)]
