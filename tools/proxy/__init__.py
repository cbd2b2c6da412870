"""Implementation of ``kvstore proxy``, which serves one address in front of prefill and decode engines."""
