"""Parser of the plain YAML that a configuration needs.

PyYAML's safe loader silently keeps the last of two equal keys, expands aliases without a limit, and raises arbitrary
Python errors for a malformed date or number. This parser reports all of these as problems with a place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import yaml


class YamlTextError(ValueError):
    """The text is not plain YAML. The message is one line and names the place, never the content."""


class Duplicate(NamedTuple):
    """A key that occurs twice in one mapping; ``line`` is that of the second occurrence, counted from 1."""

    key: str
    line: int


class YamlText(NamedTuple):
    """A parsed text.

    Attributes:
        value: None for an empty text.
        lines: the line of each key of a top-level mapping, counted from 1.
        duplicates: keys given more than once; ``value`` has the last.
    """

    value: object
    lines: dict[str, int]
    duplicates: list[Duplicate]


def parse_yaml(text: str | bytes) -> YamlText:
    """Read one YAML document.

    Raises:
        YamlTextError: it is not YAML, has several documents, aliases or tags of its own, or is nested too deeply.
    """
    try:
        loader = _PlainLoader(text)
        root = loader.get_single_node()
        if root is None:
            return YamlText(None, {}, [])
        value = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise YamlTextError(f"not valid YAML: {_one_line(error)}") from error
    except yaml.reader.ReaderError as error:
        raise YamlTextError(f"not valid YAML: {error.reason} (at position {error.position})") from error
    except RecursionError as error:
        raise YamlTextError("not valid YAML: it is nested too deeply") from error
    lines = {}
    if isinstance(root, yaml.MappingNode):
        lines = {str(name.value): name.start_mark.line + 1 for name, _ in root.value}
    return YamlText(value, lines, loader.duplicates)


def _one_line(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return place + ": ".join(part for part in (error.context, error.problem) if part)


class _PlainLoader(yaml.SafeLoader):
    """A SafeLoader without aliases, which records duplicate keys and raises only YAMLError."""

    def __init__(self, text: str | bytes) -> None:
        self.duplicates: list[Duplicate] = []
        super().__init__(text)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not supported", mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(
        self, anchor: dict[Any, yaml.Node]
    ) -> yaml.MappingNode:  # the stub is wrong: a name or None
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode):
                if name.value in seen:
                    self.duplicates.append(Duplicate(name.value, name.start_mark.line + 1))
                seen.add(name.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
            # Raised by SafeLoader's own constructors for texts such as 2024-13-01 or "!!bool maybe".
            raise yaml.constructor.ConstructorError(None, None, "this value is malformed", node.start_mark) from error
