"""Whether the TPU compiler is here, in words."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import platform

import pytest

from capibara.compile import tpu_compiler


def on(monkeypatch, system, machine, *, libtpu):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    spec = importlib.machinery.ModuleSpec("libtpu", None) if libtpu else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


@pytest.mark.quick
@pytest.mark.parametrize(("system", "machine"), [("Linux", "aarch64"), ("Darwin", "arm64"), ("Windows", "AMD64")])
def test_elsewhere_than_x86_linux(monkeypatch, system, machine):
    on(monkeypatch, system, machine, libtpu=True)
    found = tpu_compiler()
    assert not found.available
    assert found.version is None
    assert system in found.reason
    assert machine in found.reason
    assert "x86-64 Linux only" in found.reason
    assert found.install == "pip install 'jax[tpu]'"


@pytest.mark.quick
def test_not_installed_gives_the_command(monkeypatch):
    on(monkeypatch, "Linux", "x86_64", libtpu=False)
    found = tpu_compiler()
    assert not found.available
    assert str(found).endswith("pip install 'jax[tpu]'")
    assert "No TPU is needed" in str(found)


def test_installed(monkeypatch):
    on(monkeypatch, "Linux", "x86_64", libtpu=True)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0.48")
    found = tpu_compiler()
    assert found.available
    assert found.version == "0.0.48"
    assert str(found) == "libtpu 0.0.48 is installed."


@pytest.mark.tpu_compiler
def test_here():
    found = tpu_compiler()
    assert found.available
    assert found.version
