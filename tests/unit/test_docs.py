"""Documentation that a program can check."""

import ast
import json
import re
from pathlib import Path

import pytest
from test_imports import ORDER

from hs_ray.config import data_path
from hs_ray.config_docs import JOBS, fields_of, markdown

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("patches/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_configuration_is_made_from_the_schema() -> None:
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_every_key_is_documented() -> None:
    for job in JOBS.values():
        for key in fields_of(job):
            assert key.help, key.key


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_keys_in_the_readme_exist() -> None:
    known = {key.key for job in JOBS.values() for key in fields_of(job)}
    used = set(re.findall(r"\b((?:model|engine|capture|input|output|cluster|verify|export)\.\w+)=", README))
    assert used - known == set()


def test_a_command_within_the_first_thirty_lines() -> None:
    first = README.splitlines()[:30]
    assert any(line.startswith("make demo") for line in first)
    assert any(line.startswith("ray job submit") for line in first)


def test_python_in_the_readme_parses() -> None:
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        ast.parse(block)


def test_architecture_lists_every_module_in_order() -> None:
    table = re.search(r"## Modules(.*?)\n## ", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.S)
    assert table is not None
    rows = [line.split("|")[1] for line in table[1].splitlines() if line.startswith("| `")]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == ORDER


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"\.PHONY: (.*)", makefile)
    assert phony is not None
    documented = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.M))
    assert documented == set(phony[1].split())


def test_demo_samples(tiny_random: Path) -> None:
    """At least 64 varied chats, from a dozen tokens to over 2,048: longer than the default chunk on CPU."""
    from transformers import AutoTokenizer

    lines = (data_path("demo") / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(tiny_random)
    lengths = [len(tokenizer.apply_chat_template(sample["messages"])["input_ids"]) for sample in samples]
    assert len(samples) >= 64
    assert len({sample["id"] for sample in samples}) == len(samples)
    assert len({json.dumps(sample["messages"]) for sample in samples}) == len(samples)
    assert min(lengths) < 16
    assert sum(length > 2048 for length in lengths) >= 2
    assert max(lengths) < 3000
    assert 15_000 < sum(lengths) < 40_000  # under a minute of prefill on two cores
    assert any(len(sample["messages"]) >= 6 for sample in samples)
    assert all(sample["messages"][-1]["role"] == "assistant" for sample in samples)
