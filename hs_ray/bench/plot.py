"""`python -m hs_ray.bench.plot docs/throughput.json docs/throughput.svg`: what `bench.json` wrote, as bars."""

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

COLOURS = {"bare engine": "#7a828c", "capture": "#2a6fb5", "capture + write": "#1a7f45", "whole job": "#9a5b00"}
OTHER = "#b0475a"
WIDTH, LEFT, RIGHT, BAR, GAP, HEAD = 760, 160, 150, 18, 4, 30  # pixels


def draw(rows: Sequence[Mapping[str, Any]]) -> str:
    """One group of bars for each kind of prompts, one bar a way. rows: `timing.Row` as JSON."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["prompts"], []).append(row)
    most = max(row["tokens_per_s"] for row in rows)
    parts: list[str] = []
    y = 8
    for label, group in groups.items():
        y += HEAD
        parts.append(f'<text x="8" y="{y - 8}" font-weight="bold">{escape(_title(label))}</text>')
        for row in group:
            width = (WIDTH - LEFT - RIGHT) * row["tokens_per_s"] / most
            colour = COLOURS.get(row["way"], OTHER)
            text = f"{row['tokens_per_s']:,.0f} tokens/s, {row['ratio']:.3f}"
            parts.append(f'<text x="{LEFT - 8}" y="{y + BAR - 5}" text-anchor="end">{escape(row["way"])}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + width + 6:.1f}" y="{y + BAR - 5}">{text}</text>')
            y += BAR + GAP
    height = y + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12" fill="#222">\n<rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _title(label: str) -> str:
    return f"prompts of {label}" if label[0].isdigit() else f"prompts of {label} lengths"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(draw(json.loads(source.read_text())))
