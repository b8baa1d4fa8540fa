"""Without its library a file of integrations says what to install; amprewrite itself needs none of them."""

from __future__ import annotations

import sys

import pytest

import amprewrite


@pytest.mark.parametrize("package", ["accelerate", "lightning", "transformers"])
def test_what_to_install_is_said(package: str, monkeypatch: pytest.MonkeyPatch):
    name = f"amprewrite.integrations.{package}"
    for known in [each for each in sys.modules if each.partition(".")[0] == package or each == name]:
        monkeypatch.delitem(sys.modules, known)
    for missing in (package, "pytorch_lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(amprewrite.MissingPackageError, match=rf"pip install 'amprewrite\[{package}\]'") as caught:
        __import__(name)
    assert isinstance(caught.value, ImportError) and caught.value.name == package
