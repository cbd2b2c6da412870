"""Tests of the adapter that need vLLM importable, but no model."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
