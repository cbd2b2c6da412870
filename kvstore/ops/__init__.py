"""Operations: metrics and the administration of a running engine."""
