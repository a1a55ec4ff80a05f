"""The tested set of versions fits together on every supported Python, with vLLM's own requirements among the rest."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PINS = {
    canonicalize_name(name): version
    for name, equals, version in (line.strip().partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    if equals
}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_no_installed_package_declares_what_the_pins_exclude(python: str) -> None:
    """So that `pip install -c constraints.txt '.[vllm]'` can be resolved: its CPU build declares what the other one does."""
    environment = {"python_version": python, "python_full_version": f"{python}.1", "extra": ""}
    excluded, checked = [], 0
    for distribution in importlib.metadata.distributions():
        for text in distribution.requires or ():
            requirement = Requirement(text.replace("+cpu", ""))
            pin = PINS.get(canonicalize_name(requirement.name))
            if pin is None or (requirement.marker and not requirement.marker.evaluate(environment)):
                continue
            checked += 1
            if pin not in requirement.specifier:
                excluded.append(f"{distribution.name} wants {text}, pinned is {pin}")
    assert checked > 300 and not excluded


def test_every_pin_that_is_installed_takes_the_first_release_of_each_supported_python() -> None:
    declared = {
        canonicalize_name(each.name): each.metadata.get("Requires-Python") for each in importlib.metadata.distributions()
    }
    known = {name: SpecifierSet(text) for name, text in declared.items() if text and name in PINS}
    refused = [f"{name} takes Python {own}" for name, own in known.items() if "3.11.0" not in own or "3.13.0" not in own]
    assert len(known) > 150 and not refused
