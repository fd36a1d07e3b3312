"""Which layers of a model each stage of a pipeline holds, and which stages each rank."""


def layers_of_stages(n_layers: int, stages: int) -> tuple[range, ...]:
    """Divide layers over stages as evenly as can be; where that is uneven, the ends, which also embed and predict,
    have one fewer.

    >>> layers_of_stages(10, 4)
    (range(0, 2), range(2, 5), range(5, 8), range(8, 10))
    """
    fewest, over = divmod(n_layers, stages)
    larger = [*range(1, stages - 1), 0, stages - 1][:over]
    sizes = [fewest + (stage in larger) for stage in range(stages)]
    return tuple(range(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(stages))


def stages_of_rank(rank: int, ranks: int, interleave: int) -> tuple[int, ...]:
    """The stages that a rank of a pipeline holds: every ``ranks``-th one.

    >>> stages_of_rank(1, 4, 2)
    (1, 5)
    """
    return tuple(rank + turn * ranks for turn in range(interleave))
