"""Tests of the contract of a channel from another package."""

from __future__ import annotations

from support.example_channel import ProcChannel

from kvstore.testing.channels import ChannelConformance


class TestProcChannel(ChannelConformance):
    channel = ProcChannel
