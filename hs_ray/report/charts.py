"""SVG and bars, drawn in the page's own colours. Every function returns HTML; texts are escaped here."""

from collections.abc import Sequence
from html import escape

from hs_ray.plan.estimates import duration
from hs_ray.report.facts import Span

WIDTH, HEIGHT = 900.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 12.0, 12.0, 26.0  # room for the axes
TICKS = 4


def nice(most: float) -> float:
    """The next round number: the top of an axis, whose quarters are round enough."""
    if most <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= most:
        power *= 10
    while power > most:
        power /= 10
    return next(step * power for step in (1, 1.2, 1.6, 2, 3, 4, 6, 8, 10) if step * power >= most * 0.999)


def compact(value: float) -> str:
    """12,345 -> 12.3k: for axes and tiles."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def over_time(spans: Sequence[Span], values: Sequence[float], top: float, unit: str, restarts: Sequence[float]) -> str:
    """A step line with its area: one value a span. unit: `tok/s`, `%`."""
    end = spans[-1].end

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / end

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(value, top) / top)

    parts = []
    for tick in range(TICKS + 1):
        level = top * tick / TICKS
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(level):.1f}" y2="{y(level):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{compact(level)}</text>')
        at = end * tick / TICKS
        anchor = "start" if tick == 0 else "end" if tick == TICKS else "middle"
        parts.append(f'<text x="{x(at):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{duration(at)}</text>')
    line = " ".join(
        f"L{x(span.start):.1f},{y(value):.1f} L{x(span.end):.1f},{y(value):.1f}"
        for span, value in zip(spans, values, strict=True)
    )
    first, last = x(spans[0].start), x(spans[-1].end)
    parts.append(f'<path class="area" d="M{first:.1f},{y(0):.1f} {line} L{last:.1f},{y(0):.1f} Z"/>')
    parts.append(f'<path class="line" d="M{line[1:]}"/>')
    for at in restarts:
        parts.append(
            f'<line class="restart" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
            f"<title>another driver went on here</title></line>"
        )
    for span, value in zip(spans, values, strict=True):  # what a pointer shows
        text = f"{duration(span.start)} to {duration(span.end)}: {compact(value)} {unit}"
        width = max(x(span.end) - x(span.start), 0.5)
        parts.append(
            f'<rect class="hit" x="{x(span.start):.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(text)}</title></rect>'
        )
    label = f"{unit} over the time that a driver ran"
    return f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def bar(share: float) -> str:
    """A horizontal bar; share from 0 to 1."""
    return f'<div class="bar" style="width:{100 * min(max(share, 0.0), 1.0):.2f}%"></div>'


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), bars: int | None = None
) -> str:
    """numbers: columns aligned right; bars: the column that holds `bar` and is not escaped."""

    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="number"' if index in numbers else ' class="bars"' if index == bars else ""
        return f"<{tag}{kind}>{text if index == bars and tag == 'td' else escape(text)}</{tag}>"

    lines = ["<tr>" + "".join(cell("th", i, name) for i, name in enumerate(head)) + "</tr>"] if head else []
    lines += ["<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
