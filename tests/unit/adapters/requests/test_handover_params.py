"""Parsing of a request's hand-over parameters: valid ones are read, all others are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvstore.adapters.vllm.requests.params import DisaggSpec, Handover, parse_handover
from kvstore.model.errors import InvalidCallError


class TestParsing:
    def test_a_spec(self) -> None:
        params = {
            "disagg_spec": {
                "req_id": "r",
                "receiver_host": "decode-1",
                "receiver_init_port": [7000, 7005],
                "receiver_alloc_port": 7100,
                "is_last_prefill": True,
                "num_transferred_tokens": 12,
            },
            "ret_first_tok": True,
        }
        handover = parse_handover(params, "id")
        spec = DisaggSpec("r", "decode-1", (7000, 7005), (7100,), is_last_prefill=True, num_transferred_tokens=12)
        assert handover == Handover(spec, None, wants_first_token=True)
        assert [spec.receiver(rank).port for rank in range(3)] == [7000, 7005, 7005]
        assert [DisaggSpec("r", "h", (7000,)).receiver(rank).port for rank in range(3)] == [7000, 7001, 7002]
        assert parse_handover({"disagg_spec": spec.as_params()}, "id") == Handover(spec)

    def test_receivers_on_several_hosts(self) -> None:
        spec = DisaggSpec("r", "a,b", (7000, 7001, 7002, 7003))
        assert [str(spec.receiver(rank)) for rank in range(4)] == ["a:7000", "a:7001", "b:7002", "b:7003"]
        assert str(spec.receiver(9)) == "b:7003"
        assert spec.receiver_hosts == ["a", "b"]
        assert [str(DisaggSpec("r", "a,b", (7000,)).receiver(rank)) for rank in range(2)] == ["a:7000", "a:7001"]

    @pytest.mark.parametrize(
        ("request_id", "host", "port"),
        [
            ("cmpl-___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_93f3-0-abc", "10.0.1.3", 22001),
            ("___prefill_addr_a.b:1___decode_addr_c-d.e:65535_0", "c-d.e", 65535),
            ("___prefill_addr_[::1]:1___decode_addr_[fe80::1]:7_0", "fe80::1", 7),
        ],
    )
    def test_addresses_in_the_request_id(self, request_id: str, host: str, port: int) -> None:
        handover = parse_handover(None, request_id)
        assert handover == Handover(DisaggSpec(request_id, host, (port,)))

    @pytest.mark.parametrize(
        "request_id", ["chatcmpl-1", "___decode_addr_", "___decode_addr_host:", "___decode_addr_:1"]
    )
    def test_nothing_of_the_kind(self, request_id: str) -> None:
        assert parse_handover({"kvstore.skip_save": True}, request_id) is None

    @pytest.mark.parametrize(
        "params",
        [
            {"disagg_spec": "secret"},
            {"disagg_spec": {}},
            {"disagg_spec": {"receiver_host": 3, "receiver_init_port": 1}},
            {"disagg_spec": {"receiver_host": "", "receiver_init_port": 1}},
            {"disagg_spec": {"receiver_host": "a\nb", "receiver_init_port": 1}},
            {"disagg_spec": {"receiver_host": "secret" * 100, "receiver_init_port": 1}},
            {"disagg_spec": {"receiver_host": "h", "receiver_init_port": 0}},
            {"disagg_spec": {"receiver_host": "h", "receiver_init_port": 65536}},
            {"disagg_spec": {"receiver_host": "h", "receiver_init_port": True}},
            {"disagg_spec": {"receiver_host": "h", "receiver_init_port": []}},
            {"disagg_spec": {"receiver_host": "h", "receiver_init_port": ["secret"]}},
            {"disagg_spec": {"receiver_host": "h", "receiver_init_port": 1, "num_transferred_tokens": -1}},
            {"disagg_spec": {"receiver_host": "h", "receiver_init_port": 1, "req_id": 7}},
            {"remote_host": "h"},
            {"remote_host": "h", "remote_port": "secret", "num_tokens": 1},
            {"remote_host": "h", "remote_port": 1, "num_tokens": 1.5},
        ],
    )
    def test_wrong_fields_are_named_and_not_shown(self, params: dict[str, object]) -> None:
        with pytest.raises(InvalidCallError, match="must be") as caught:
            parse_handover(params, "id")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["receiver_init_port", "receiver_alloc_port"])
def test_a_list_of_wrong_ports_costs_one_error(name: str) -> None:
    """A client may send millions of them, and they are read on the scheduler's thread."""
    spec = {"req_id": "a", "receiver_host": "h", "receiver_init_port": 1, name: ["x"] * 1000}
    with pytest.raises(InvalidCallError, match=rf"{name} must be a port from 1 to 65535, or a list") as caught:
        parse_handover({"disagg_spec": spec}, "id")
    assert isinstance(caught.value.__context__, ValidationError)
    assert caught.value.__context__.error_count() == 1
