"""recipe/open_jev/native.md, followed word for word with a tiny base model, and what it says of settings and units."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest

from jev.checkpoint.pinned import PINNED
from jev.gateway.settings import GatewaySettings
from jev.settings import settable
from tests.faults.harness import ROOT
from tests.faults.rehearsal import RECIPE, blocks, downloads, environments, follow, write_downloads


def test_the_recipe_ends_with_an_answer_through_the_gateway(tmp_path):
    """With stand-ins for torch and transformers, and those only where the recipe installs them.

    tests/parity/test_recipe_parity.py does the same with the real ones.
    """
    follow(tmp_path, "stand-ins")


def test_an_environment_without_the_extra_cannot_export(tmp_path):
    """What ``follow`` relies on: the wrong environment is not helped out."""
    write_downloads(tmp_path, real_torch=False)
    (_, base), (_, repository) = downloads()
    command = [sys.executable, "-m", "tests.faults.rehearsal", "absent", "export", "--base", tmp_path / base,
               "--checkpoint", tmp_path / repository / "package/checkpoint", "--out", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "needs torch: in the checkout, pip install '.[export]'" in done.stderr


@pytest.mark.parametrize("name", ["README.md", "recipe/open_jev/native.md"])
def test_exports_are_made_where_the_extra_is(name):
    text = (ROOT / name).read_text()
    place, = (f"{folder}/bin/" for folder, extra in environments(text).items() if extra == "export")
    for command in ("jev export --", "hf download"):
        assert set(re.findall(rf"^ *(\S*){command}", text, re.M)) <= {place}
    assert f"{place}jev export --" in text


def test_the_recipe_downloads_what_is_pinned():
    source = next(p for p in PINNED if p.alias.endswith("27b") or "27B" in p.title)
    assert [repo for repo, _ in downloads()] == [source.model_id, source.checkpoint_repo]
    for p in PINNED:
        for revision in (p.base_revision, p.checkpoint_revision):
            assert f"`{revision}`" in RECIPE
    assert re.findall(r"--revision (\S+)", RECIPE) == [source.base_revision, source.checkpoint_revision]


def test_no_key_can_be_copied():
    assert not re.search(r"^ *OPEN_JEV_API_KEY=", RECIPE, re.M)


def test_every_setting_is_in_the_recipe_with_its_default():
    rows = {row[1].strip("` "): row for line in RECIPE.splitlines() if (row := line.split("|"))[1:] and len(row) == 6}
    for f in settable():
        row = rows[f.metadata["env"][0]]
        assert row[2].strip("` ") == (f.metadata["flag"] or "")
        expected = {"graph": "1", "verify": "0", "drain_seconds": "60", "api_key": "none"}.get(f.name, f.default)
        expected = "none" if f.default == () else expected
        assert f.default is None and f.name != "api_key" or row[3].strip() == str(expected), row
    for f in fields(GatewaySettings):
        row = rows["OMNI_JEV_" + f.name.upper()]
        assert row[2].strip("` ") == "--" + f.name.replace("_", "-")
        assert row[3].strip() == str(f.default)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_units_are_valid(tmp_path):
    units = blocks("unit")
    assert list(units) == ["jev-worker.service", "jev-gateway.service"]
    for name, text in units.items():
        path = tmp_path / name
        path.write_text(text.replace("/opt/jev/.venv/bin/jev", "/bin/true").replace("User=jev", "User=root"))
        verify = ["systemd-analyze", "verify", "--man=no", path]
        done = subprocess.run(verify, capture_output=True, text=True, timeout=60)
        said = [line for line in done.stderr.splitlines() if name in line]
        assert not said, said
