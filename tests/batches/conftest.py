"""Fixtures shared by the tests of files and batches."""

from __future__ import annotations

from tests.coordinator.conftest import text_model

__all__ = ["text_model"]
