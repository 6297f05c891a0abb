"""The edits as libcst makes them. The only file that imports libcst as it is imported itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import PositionProvider

from capibara.migrate.edits import Edits, ImportChange, Imported, Target

__all__ = ["Rewriter"]

Span = tuple[int, int, int, int]
_Expression = TypeVar("_Expression", bound=cst.BaseExpression)
_Line = tuple[cst.BaseSmallStatement, cst.Comment | None]
"""A statement, and the comment beside it."""
_Moves = list[tuple[cst.ImportAlias, Imported | None]]
"""Names of a statement, and how each is imported now; None for one that stays."""


class Rewriter(cst.CSTTransformer):
    """Applies edits by the place that each names."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, edits: Edits, target: Target) -> None:
        super().__init__()
        self._edits = edits
        self._target = target
        self._imports = {change.at: change for change in edits.imports}
        self._left: set[Span] = {*edits.expressions, *edits.keywords, *edits.named, *self._imports}
        self._removed: set[int] = set()

    @property
    def left(self) -> list[Span]:
        """Edits that did not find their place."""
        return sorted(self._left)

    def _span(self, node: cst.CSTNode) -> Span:
        place: Any = self.get_metadata(PositionProvider, node)
        return place.start.line, place.start.column, place.end.line, place.end.column

    # Expressions.

    def _replaced(self, original: _Expression, updated: _Expression) -> cst.BaseExpression:
        span = self._span(original)
        text = self._edits.expressions.get(span)
        if text is None:
            return updated
        self._left.discard(span)
        expression = cst.parse_expression(text)
        left = [*getattr(updated, "lpar", ()), *getattr(expression, "lpar", ())]
        right = [*getattr(expression, "rpar", ()), *getattr(updated, "rpar", ())]
        return expression.with_changes(lpar=left, rpar=right)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:  # noqa: N802
        return self._replaced(original_node, updated_node)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:  # noqa: N802
        return self._replaced(original_node, updated_node)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        return self._replaced(original_node, updated_node)

    def leave_SimpleString(  # noqa: N802
        self, original_node: cst.SimpleString, updated_node: cst.SimpleString
    ) -> cst.BaseExpression:
        span = self._span(original_node)
        text = self._edits.expressions.get(span)
        if text is None:
            return updated_node
        self._left.discard(span)
        return updated_node.with_changes(value=f"{updated_node.quote}{text[1:-1]}{updated_node.quote}")

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:  # noqa: N802
        span = self._span(original_node)
        if original_node.keyword is not None and span in self._edits.keywords:
            self._left.discard(span)
            return updated_node.with_changes(keyword=cst.Name(self._edits.keywords[span]))
        if original_node.keyword is None and not original_node.star:
            span = self._span(original_node.value)
            if span in self._edits.named:
                self._left.discard(span)
                equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
                return updated_node.with_changes(keyword=cst.Name(self._edits.named[span]), equal=equal)
        return updated_node

    # Imports.

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        changed = self._changed_line(original_node, updated_node)
        if changed is None:
            return updated_node
        body, comments = changed
        alone = len(updated_node.body) == 1
        if not body:
            self._removed.add(id(updated_node))
            return updated_node
        if not alone:
            parts = [one.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for one in body]
            return updated_node.with_changes(body=parts)
        lines = []
        for number, (statement, comment) in enumerate(zip(body, comments, strict=True)):
            statement = statement.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            if number == 0:
                lines.append(updated_node.with_changes(body=[statement]))
            else:
                lines.append(_line(statement, comment))
        return cst.FlattenSentinel(lines)

    def leave_SimpleStatementSuite(  # noqa: N802
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        """`if new: import …` on one line."""
        changed = self._changed_line(original_node, updated_node)
        if changed is None:
            return updated_node
        body = [one.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for one in changed[0]]
        return updated_node.with_changes(body=body or [cst.Pass()])

    def _changed_line(
        self,
        original: cst.SimpleStatementLine | cst.SimpleStatementSuite,
        updated: cst.SimpleStatementLine | cst.SimpleStatementSuite,
    ) -> tuple[list[cst.BaseSmallStatement], list[cst.Comment | None]] | None:
        """The statements of a line, and the comment of each that is new; None where none changes."""
        changes = [self._imports.get(self._span(small)) for small in original.body]
        if not any(changes):
            return None
        body: list[cst.BaseSmallStatement] = []
        comments: list[cst.Comment | None] = []
        for small, change in zip(updated.body, changes, strict=True):
            if change is None or not isinstance(small, cst.Import | cst.ImportFrom):
                body.append(small)
                comments.append(None)
                continue
            self._left.discard(change.at)
            for statement, comment in _changed(small, change):
                body.append(statement)
                comments.append(comment)
        return body, comments

    def leave_IndentedBlock(  # noqa: N802
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        body, comments = self._without_removed(updated_node.body)
        if body is None:
            return updated_node
        return updated_node.with_changes(body=body, footer=[*comments, *updated_node.footer])

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        body, comments = self._without_removed(updated_node.body)
        if body is not None:
            updated_node = updated_node.with_changes(body=body, footer=[*comments, *updated_node.footer])
        new = [line for line in self._new_lines() if line not in _top_imports(updated_node)]
        if not new:
            return updated_node
        lines = [_line(_parsed(line), None) for line in new]
        place = _place_of_imports(updated_node, [f"{module}." for module in self._edits.added])
        return updated_node.with_changes(body=[*updated_node.body[:place], *lines, *updated_node.body[place:]])

    def _without_removed(
        self, body: Sequence[cst.BaseStatement]
    ) -> tuple[list[cst.BaseStatement] | None, list[cst.EmptyLine]]:
        """The statements without those that are gone, whose comments go to the next one; None where none is."""
        if not any(id(one) in self._removed for one in body):
            return None, []
        kept: list[cst.BaseStatement] = []
        comments: list[cst.EmptyLine] = []
        for one in body:
            leading = list(getattr(one, "leading_lines", ()))
            if id(one) in self._removed:
                comments += [line for line in leading if line.comment is not None]
            else:
                if comments:
                    one = one.with_changes(leading_lines=[*comments, *leading])
                comments = []
                kept.append(one)
        return kept, comments

    def _new_lines(self) -> list[str]:
        lines = []
        for module in self._edits.added:
            if self._target == "capibara" and module.partition(".")[0] == "jax":
                lines.append("import capibara.jax as jax")
                if module != "jax":
                    lines.append(f"import capibara.{module}")
            else:
                lines.append(f"import {module}")
        return list(dict.fromkeys(lines))


def _line(statement: cst.BaseSmallStatement, comment: cst.Comment | None) -> cst.SimpleStatementLine:
    whitespace = cst.SimpleWhitespace("  " if comment is not None else "")
    return cst.SimpleStatementLine([statement], trailing_whitespace=cst.TrailingWhitespace(whitespace, comment))


def _parsed(line: str) -> cst.BaseSmallStatement:
    statement = cst.parse_statement(line)
    assert isinstance(statement, cst.SimpleStatementLine)
    return statement.body[0]


def _top_imports(module: cst.Module) -> set[str]:
    return {
        module.code_for_node(small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)).strip()
        for line in module.body
        if isinstance(line, cst.SimpleStatementLine)
        for small in line.body
        if isinstance(small, cst.Import | cst.ImportFrom)
    }


def _place_of_imports(module: cst.Module, used: Sequence[str]) -> int:
    """After the first import of jax at the top; else before the first function and the first use.

    What a program does before it imports jax, such as setting XLA_FLAGS, goes on being done before.
    """
    for number, line in enumerate(module.body):
        if not isinstance(line, cst.SimpleStatementLine):
            is_definition = isinstance(line, cst.FunctionDef | cst.ClassDef)
            if is_definition or any(text in module.code_for_node(line) for text in used):
                return number
            continue
        first = line.body[0]
        if isinstance(first, cst.Import) and _dotted(first.names[0].name).startswith(("jax", "capibara")):
            return number + 1
        if isinstance(first, cst.ImportFrom):
            module_name = "" if first.module is None or first.relative else _dotted(first.module)
            if module_name.startswith(("jax", "capibara")):
                return number + 1
        elif not _is_docstring(first, number) and any(text in module.code_for_node(line) for text in used):
            return number
    return len(module.body)


def _is_docstring(statement: cst.BaseSmallStatement, number: int) -> bool:
    texts = (cst.SimpleString, cst.ConcatenatedString)
    return number == 0 and isinstance(statement, cst.Expr) and isinstance(statement.value, texts)


def _dotted(node: cst.BaseExpression) -> str:
    return f"{_dotted(node.value)}.{node.attr.value}" if isinstance(node, cst.Attribute) else getattr(node, "value", "")


def _changed(statement: cst.Import | cst.ImportFrom, change: ImportChange) -> list[_Line]:
    """The statements that stand in its place: the first in its form, with the names that stay together."""
    moves = dict(change.moves)
    if isinstance(statement, cst.ImportFrom) and isinstance(statement.names, cst.ImportStar):
        return [(_in_place(statement, [(None, one)]), None) for moved in moves.values() for one in moved]
    names = list(statement.names)  # type: ignore[arg-type]
    first: _Moves = [(alias, None) for number, alias in enumerate(names) if number not in moves]
    others: _Moves = [(names[number], one) for number, moved in change.moves for one in moved]
    if not first and isinstance(statement, cst.ImportFrom):
        first = _together(statement, others)
        others = [pair for pair in others if pair not in first]
    found: list[_Line] = []
    if first:
        kept = _closed([alias for alias, _ in first], names, statement)
        pairs = [(alias, one) for alias, (_, one) in zip(kept, first, strict=True)]
        found.append((_in_place(statement, pairs), None))
    found += [(_parsed(_written(one)), _comment(alias)) for alias, one in others if one is not None]
    return _merged(found)


def _together(statement: cst.ImportFrom, others: _Moves) -> _Moves:
    """Of names that all move, those that keep the statement's form: what goes to one module, its own if some do."""
    modules = [one.module for _, one in others if one is not None and one.name is not None]
    own = f"capibara.{_dotted(statement.module)}" if statement.module is not None else ""
    chosen = own if own in modules else modules[0] if modules else None
    return [(alias, one) for alias, one in others if one is not None and one.name is not None and one.module == chosen]


def _in_place(
    statement: cst.Import | cst.ImportFrom, pairs: Sequence[tuple[cst.ImportAlias | None, Imported | None]]
) -> cst.Import | cst.ImportFrom:
    """The same statement with these names: its parentheses and comments stay."""
    new = pairs[0][1]
    if new is not None and isinstance(statement, cst.ImportFrom):
        statement = statement.with_changes(module=cst.parse_expression(new.module))
    names = []
    for alias, one in pairs:
        if alias is not None and one is not None:
            asname = None if one.asname is None else cst.AsName(cst.Name(one.asname))
            asname = alias.asname if alias.asname is not None and asname is not None else asname
            alias = alias.with_changes(name=cst.Name(one.name or ""), asname=asname)
        if alias is not None:
            names.append(alias)
    return statement.with_changes(names=names) if names else statement


def _closed(
    kept: list[cst.ImportAlias], names: list[cst.ImportAlias], statement: cst.Import | cst.ImportFrom
) -> list[cst.ImportAlias]:
    """The names that stay, the last of them followed by what followed the last of all."""
    if kept[-1] is names[-1]:
        return kept
    before, after = kept[-1].comma, names[-1].comma
    if not isinstance(statement, cst.ImportFrom) or statement.lpar is None:
        after = cst.MaybeSentinel.DEFAULT
    elif isinstance(before, cst.Comma) and isinstance(after, cst.Comma):
        own, last = before.whitespace_after, after.whitespace_after
        if isinstance(own, cst.ParenthesizedWhitespace) and isinstance(last, cst.ParenthesizedWhitespace):
            last = last.with_changes(first_line=own.first_line)
        after = after.with_changes(whitespace_after=last)
    return [*kept[:-1], kept[-1].with_changes(comma=after)]


def _comment(alias: cst.ImportAlias) -> cst.Comment | None:
    after = getattr(alias.comma, "whitespace_after", None)
    return after.first_line.comment if isinstance(after, cst.ParenthesizedWhitespace) else None


def _written(one: Imported) -> str:
    alias = f" as {one.asname}" if one.asname else ""
    return f"import {one.module}{alias}" if one.name is None else f"from {one.module} import {one.name}{alias}"


def _merged(found: list[_Line]) -> list[_Line]:
    """New statements of one module as one; a statement that came twice once."""
    merged: list[_Line] = []
    for statement, comment in found:
        for number, (other, other_comment) in enumerate(merged):
            if statement.deep_equals(other):
                break
            if _same_module(statement, other) and not (comment and other_comment):
                names = [*other.names, *statement.names]  # type: ignore[attr-defined]
                comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
                joined = [*(one.with_changes(comma=comma) for one in names[:-1]), names[-1]]
                merged[number] = (other.with_changes(names=joined), comment or other_comment)
                break
        else:
            merged.append((statement, comment))
    return merged


def _same_module(one: cst.BaseSmallStatement, other: cst.BaseSmallStatement) -> bool:
    return (
        isinstance(one, cst.ImportFrom)
        and isinstance(other, cst.ImportFrom)
        and one.module is not None
        and other.module is not None
        and other.lpar is None
        and not isinstance(other.names, cst.ImportStar)
        and one.module.deep_equals(other.module)
    )
