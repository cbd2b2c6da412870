"""``kvstore proxy``: one address in front of prefill and decode engines."""
