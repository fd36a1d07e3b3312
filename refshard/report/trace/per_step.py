"""What times of a trace are of, in words: a step, a window that a user chose, or the whole trace."""

from refshard.tracing.figures import TraceFigures


def has_steps(figures: TraceFigures) -> bool:
    """Whether the trace tells steps apart; one that does not has its whole length as its only step, or none."""
    return any(step.step is not None for step in figures.steps)


def each(figures: TraceFigures) -> str:
    """What times of this trace are means over, or of."""
    if figures.windows is not None:
        return "window"
    return "step" if has_steps(figures) else "trace"


def per(figures: TraceFigures) -> str:
    """What a column of times is for, in its head: "per step"; of a trace without steps "in the trace"."""
    return f"in the {each(figures)}" if is_alone(figures) else f"per {each(figures)}"


def in_each(figures: TraceFigures) -> str:
    """The same in a sentence, after a time: "a step", "in the trace"."""
    return f"in the {each(figures)}" if is_alone(figures) else f"a {each(figures)}"


def of_each(figures: TraceFigures) -> str:
    """The same after a share: "a step", "the trace"."""
    return f"{'the' if is_alone(figures) else 'a'} {each(figures)}"


def is_alone(figures: TraceFigures) -> bool:
    """Whether times are of one stretch of time, the trace or the only window, and no means."""
    return not has_steps(figures) or (figures.windows is not None and len(figures.steps) == 1)
