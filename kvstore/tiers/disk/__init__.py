"""The disk tier: one file per chunk, in one folder or striped over several."""
