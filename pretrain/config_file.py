"""A run's settings from text: one YAML file plus ``section.key=value`` overrides, and back."""

import dataclasses
import difflib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import ValidationError

from pretrain.config import Config, Section
from pretrain.errors import UserError
from pretrain.recipe import fill_optimizer


def load_config(path: Path, overrides: list[str]) -> Config:
    """Read ``path`` and apply ``overrides`` of the form ``section.key=value`` (values are YAML).

    Raises:
        UserError: on an unreadable file, an unknown key, a wrong type or a broken override.
    """
    types = setting_types(Config)
    tree = _read_yaml(path)
    _refuse_unknown(tree, types, str(path))
    for override in overrides:
        _refuse_unknown(_apply_override(tree, override), types, f"argument {override!r}")
    fill_optimizer(tree)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        name, fault = _first_fault(error, types)
        given = [override for override in overrides if override.partition("=")[0] == name]
        where = f"argument {given[-1]!r}" if given else str(path)
        raise UserError(f"{where}: {fault}") from None


def dump_config(config: Config) -> str:
    """The resolved settings as YAML; :func:`load_config` reads it back to an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def setting_types(section: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> type of a section class's settings and of the sections below it."""
    types: dict[str, Any] = {}
    for key, annotation in get_type_hints(section).items():
        if key in ("model_config", "__pydantic_config__"):
            continue
        types[prefix + key] = annotation
        if _is_section(annotation):
            types |= setting_types(annotation, f"{prefix}{key}.")
    return types


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and (issubclass(annotation, Section) or dataclasses.is_dataclass(annotation))


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML whose mappings refuse a key given twice: the first value would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {line}: the name of a setting must be a word")
            if key_node.value in seen:
                raise yaml.YAMLError(f"line {line}: {key_node.value} is given twice; remove one")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            # Two sections would be one object, and an override of the one would silently change the other.
            raise yaml.YAMLError(f"line {self.line + 1}: aliases (*name) are not supported; write the settings out")
        return super().compose_node(parent, index)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except RecursionError:
        raise UserError(f"{where}: nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        # PyYAML lets its converters' errors through: a date that does not exist, a tag that does not fit.
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the configuration: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: the configuration is not UTF-8 text") from None
    tree = _parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path}: the configuration must be sections of settings (section: key: value)")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> dict[str, Any]:
    """Put one override into ``tree``; returns it as a tree of its own."""
    where = f"argument {override!r}"
    name, equals, text = override.partition("=")
    if not equals or not name or name.startswith("-"):
        raise UserError(f"{where}: an override is written section.key=value")
    value = _parse_yaml(text, where)
    *sections, key = name.split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise UserError(f"{where}: {section} is not a section")
    node[key] = value
    alone: Any = value
    for part in reversed(name.split(".")):
        alone = {part: alone}
    assert isinstance(alone, dict)
    return alone


def _refuse_unknown(tree: dict[str, Any], types: dict[str, Any], where: str) -> None:
    for name, value in _leaves(tree):
        if name not in types:
            raise UserError(f"{where}: {_unknown(name, types)}")
        if _is_section(types[name]) and not isinstance(value, dict):
            raise UserError(f"{where}: {name} is a section; give {name}.KEY=VALUE with {_keys_of(name, types)}")
        if isinstance(value, bool) and bool not in (types[name], *get_args(types[name])):
            raise UserError(f"{where}: {name}={str(value).lower()}: must not be true or false")
        if isinstance(value, str) and "\0" in value:
            raise UserError(f"{where}: {name} holds a NUL character")


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted name and value of every section and setting."""
    pairs = []
    for key, value in tree.items():
        pairs.append((f"{prefix}{key}", value))
        if isinstance(value, dict):
            pairs += _leaves(value, f"{prefix}{key}.")
    return pairs


def _unknown(name: str, types: dict[str, Any]) -> str:
    section, _, leaf = name.rpartition(".")
    by_leaf = [other for other in types if other.rpartition(".")[2] == leaf]
    near = sorted(by_leaf) or difflib.get_close_matches(name, sorted(types), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    keys = f" ({section} has {_keys_of(section, types)})" if section in types else ""
    return f"{name} is not a setting{hint}{keys}"


def _keys_of(section: str, types: dict[str, Any]) -> str:
    return ", ".join(name.rpartition(".")[2] for name in types if name.rpartition(".")[0] == section)


def _first_fault(error: ValidationError, types: dict[str, Any]) -> tuple[str, str]:
    """Name of the first faulty setting, and one line on it."""
    faults = error.errors()
    first = faults[0]
    name = ""
    for part in first["loc"]:  # a union's branches follow the setting's own name
        if f"{name}{part}" not in types:
            break
        name += f"{part}."
    name = name.rstrip(".")
    depth = name.count(".") + 1
    inner = first["loc"][depth:]
    # Within a list of sections the place matters; elsewhere what follows are branches of a union.
    full = ".".join([name, *map(str, inner)]) if inner and isinstance(inner[0], int) else name
    if first["type"] in ("missing", "missing_keyword_only_argument"):
        missing = ".".join(str(part) for part in first["loc"])
        if _is_section(types.get(missing)):
            return missing, f"the section {missing} is missing"
        if full != name:
            return name, f"{missing} is missing; give it in {name}"
        return missing, f"{missing} is missing; give it in the file or as {missing}=VALUE"
    same = [fault["msg"] for fault in faults if fault["loc"][:depth] == first["loc"][:depth]]
    wishes = " or ".join(message[0].lower() + message[1:] for message in (same if full == name else [first["msg"]]))
    return name, f"{full}={first['input']!r}: {wishes}"
