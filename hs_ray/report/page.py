"""The page: facts in the order of a reader's questions. Did it work, how fast, what is in it, what is missing."""

import json
import shlex
from collections.abc import Mapping
from html import escape
from typing import Any

from hs_ray.plan.estimates import duration, size
from hs_ray.report.charts import bar, compact, nice, over_time, table
from hs_ray.report.facts import Facts, collect
from hs_ray.schema import Marker
from hs_ray.storage import Storage

REPORT = "_run/report.html"

STYLE = """
:root { color-scheme: light dark; --line: light-dark(#dfe3e8, #2d333b); --soft: light-dark(#5b6570, #9aa5b1);
  --ink: light-dark(#1b1f24, #e6e9ed); --page: light-dark(#ffffff, #111418); --panel: light-dark(#f6f8fa, #191d23);
  --bar: light-dark(#2a6fb5, #62a5e6); --area: light-dark(#2a6fb526, #62a5e633); --good: light-dark(#1a7f45, #4cc38a);
  --warn: light-dark(#9a5b00, #e3a64a); }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem 4rem;
  background: var(--page); color: var(--ink); }
h1 { font-size: 1.5rem; margin: 0; text-wrap: balance; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); } code { overflow-wrap: anywhere; }
.state { font-weight: 600; } .good { color: var(--good); } .warn { color: var(--warn); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem; margin-top: 1.2rem; }
.tile, .wide { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .9rem; }
.tile b { display: block; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .22rem .9rem .22rem 0; vertical-align: top; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; } tr + tr > * { border-top: 1px solid var(--line); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; } td.bars { width: 45%; }
.bar { background: var(--bar); height: .75rem; margin-top: .35rem; border-radius: 2px; min-width: 1px; }
svg { display: block; width: 100%; min-width: 36rem; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--line); } .line { fill: none; stroke: var(--bar); stroke-width: 1.6; }
.area { fill: var(--area); } .restart { stroke: var(--warn); stroke-dasharray: 4 3; stroke-width: 1.5; }
.hit { fill: transparent; } .hit:hover { fill: var(--area); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: 13px; }
summary { cursor: pointer; color: var(--soft); }
"""


def write_report(storage: Storage, markers: Mapping[int, Marker] | None = None) -> str:
    """Write the page into the output; returns its path. Raises OutputError where there is no run."""
    storage.write(REPORT, page(collect(storage, markers)).encode())
    return f"{storage.root}/{REPORT}"


def page(facts: Facts) -> str:
    """The whole page; it loads nothing, and is light or dark as the system is."""
    sections = [
        _head(facts), _over_time(facts), _engines(facts), _lengths(facts), _rejects(facts), _states(facts),
        _sizes(facts), _origin(facts),
    ]  # fmt: skip
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = f"<title>hs_ray: {escape(facts.root)}</title>"
    body = "\n".join(part for section in sections for part in section)
    head = f'<html lang="en"><head>{meta}{title}<style>{STYLE}</style></head>'
    return f"<!doctype html>\n{head}<body>\n{body}\n</body></html>\n"


def _head(facts: Facts) -> list[str]:
    plan = facts.plan
    missing = plan.rejected + len(facts.failed)
    if not facts.complete:
        state = f'<span class="state warn">unfinished: {facts.units:,} of {plan.units:,} units</span>'
    elif missing:
        state = f'<span class="state warn">complete, {missing:,} lines without states</span>'
    else:
        state = '<span class="state good">complete</span>'
    tiles = [
        (f"{facts.samples:,}", f"samples of {plan.samples:,}"),
        (compact(facts.tokens), "tokens"),
        (size(facts.bytes), f"in {len(facts.shard_bytes):,} shards"),
        (f"{missing:,}", "lines without states"),
    ]
    if facts.spans:
        written = sum(span.rate * (span.end - span.start) for span in facts.spans)
        working = sum(span.end - span.start for span in facts.spans if span.rate) or facts.seconds
        tiles += [(duration(facts.seconds), "driver time")]
        tiles += [(compact(written / working), "tok/s while writing")] if written else []
    cells = "".join(f'<div class="tile"><b>{escape(value)}</b>{escape(name)}</div>' for value, name in tiles)
    model = facts.run["model"]
    return [
        f"<h1>Hidden states of {escape(str(model['name']))}</h1>",
        f'<p>{state} <span class="soft">· {escape(facts.root)} · started {escape(str(facts.run.get("started", "")))}'
        f"</span></p>",
        f'<div class="tiles">{cells}</div>',
    ]


def _over_time(facts: Facts) -> list[str]:
    if not facts.spans:
        return []
    rates, busy = [span.rate for span in facts.spans], [100 * span.busy for span in facts.spans]
    note = '<p class="soft">A dashed line: a driver ended there and another went on.</p>' if facts.restarts else ""
    return [
        "<h2>Tokens per second</h2>",
        f'<div class="wide">{over_time(facts.spans, rates, nice(max(rates)), "tok/s", facts.restarts)}</div>',
        "<h2>Engines busy, % of the time</h2>",
        f'<div class="wide">{over_time(facts.spans, busy, 100.0, "%", facts.restarts)}</div>',
        note,
    ]


def _engines(facts: Facts) -> list[str]:
    if not facts.engines:
        return []
    most = max(max(engine.tokens for engine in facts.engines), 1)
    rows = [
        (e.name, e.node, f"{e.units:,}", f"{e.tokens:,}", f"{e.tokens / e.busy_s:,.0f}" if e.busy_s else "",
         bar(e.tokens / most))
        for e in facts.engines
    ]  # fmt: skip
    head = ("engine", "node", "units", "tokens", "tok/s busy", "")
    slowest = [(f"{m.unit}", m.engine, f"{m.tokens:,}", f"{m.seconds:.1f} s") for m in facts.slowest]
    return [
        "<h2>Engines</h2>",
        table(head, rows, numbers=(2, 3, 4), bars=5),
        "<h2>Slowest units</h2>",
        table(("unit", "engine", "tokens", "took"), slowest, numbers=(2, 3)),
    ]


def _lengths(facts: Facts) -> list[str]:
    plan = facts.plan
    bins = plan.length_histogram
    if not bins:
        return []
    most = max(count for _, count in bins)
    rows = [(f"{top:,}", f"{count:,}", bar(count / most)) for top, count in bins]
    share = plan.learned_tokens / max(plan.tokens, 1)
    return [
        "<h2>Samples by length</h2>",
        table(("tokens, up to", "samples", ""), rows, numbers=(0, 1), bars=2),
        f'<p class="soft">{plan.tokens:,} tokens, {share:.0%} of them learned; longest sample '
        f"{plan.longest_tokens:,}; {plan.truncated:,} samples cut.</p>",
    ]


def _rejects(facts: Facts) -> list[str]:
    codes = facts.rejects_by_code
    plan = facts.plan
    parts = f"{plan.samples:,} samples + {plan.rejected:,} rejected + {plan.blank:,} blank"
    total = f"{plan.lines:,} lines = {parts}"
    if not codes:
        return ["<h2>Lines without states</h2>", f"<p>None. {total}.</p>"]
    rows = []
    for code, count in codes.items():
        for number, reject in enumerate(facts.examples.get(code, []) or [None]):
            shown = (f"{reject.source}, line {reject.line}", reject.message) if reject else ("", "")
            rows.append((code if number == 0 else "", f"{count:,}" if number == 0 else "", *shown))
    return [
        "<h2>Lines without states</h2>",
        table(("code", "lines", "for example", "why"), rows, numbers=(1,)),
        f'<p class="soft">{total}; all of them are in _rejects/.</p>',
    ]


def _states(facts: Facts) -> list[str]:
    if not facts.columns:
        return []
    width = facts.run["spec"]["hidden_size"]
    spelt = {layer["column"]: layer["output_of_layer"] for layer in facts.run["spec"]["layers"]}
    most = max(stats.rms(width) for stats in facts.columns.values()) or 1.0
    rows = []
    for name, stats in facts.columns.items():
        output_of = spelt.get(name)
        meaning = (
            "after the last layer"
            if name not in spelt
            else "embeddings"
            if output_of is None
            else f"output of layer {output_of}"
        )
        rms = stats.rms(width)
        odd = f"{stats.zero_rows + stats.nonfinite_rows:,}"
        rows.append((name, meaning, f"{stats.rows:,}", f"{rms:.4g}", f"{stats.absmax:.4g}", odd, bar(rms / most)))
    head = ("column", "layers counted from 0", "tokens", "RMS", "largest", "zero or not finite", "")
    return ["<h2>States</h2>", table(head, rows, numbers=(2, 3, 4, 5), bars=6)]


def _sizes(facts: Facts) -> list[str]:
    sizes = facts.shard_bytes
    if not sizes:
        return []
    spec = facts.run["spec"]
    raw = facts.tokens * spec["hidden_size"] * 2 * len(spec["columns"])
    rows = [
        ("states", f"{size(raw)}: {spec['hidden_size']:,} x 2 bytes x {len(spec['columns'])} columns a token"),
        ("on disk", f"{size(facts.bytes)}, {facts.bytes / max(raw, 1):.3f} of that"),
        ("a shard", f"smallest {size(sizes[0])}, median {size(sizes[len(sizes) // 2])}, largest {size(sizes[-1])}"),
        ("rows", f"{facts.rows:,}"),
    ]
    return ["<h2>Sizes</h2>", table((), rows)]


def _origin(facts: Facts) -> list[str]:
    run = facts.run
    model = run["model"]
    rows = [
        ("model", f"{model['name']} ({model.get('architecture')}, {run['spec']['num_hidden_layers']} layers)"),
        *[(name, str(value)) for name, value in run.get("versions", {}).items()],
        ("fingerprint", run["fingerprint"]),
        ("input", ", ".join(str(source.get("source", source)) for source in run.get("sources", [])[:20])),
    ]
    command = shlex.join(str(word) for word in run.get("command", []))
    return [
        "<h2>Versions and command</h2>",
        table((), rows),
        f'<div class="wide" style="margin-top:.7rem"><pre>{escape(command)}</pre></div>',
        f"<details><summary>configuration</summary><pre>{escape(_config(run))}</pre></details>",
    ]


def _config(run: dict[str, Any]) -> str:
    return json.dumps(run.get("config", {}), indent=1)
