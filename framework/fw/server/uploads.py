"""Forms with a file in them, read as they come."""

from __future__ import annotations

from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from fw.server.errors import ApiError, wrong

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"contentMediaType": "application/octet-stream"},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
    "additionalProperties": False,
}
"""Of an upload, as the OpenAPI document has it."""
_LONGEST_FIELD, _LONGEST_NAME = 64, 255


class Form:
    """Of an upload, as it comes.

    Attributes:
        content: of the file, as much as has been read and not been taken.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise wrong("the body is no form; send one, with the header Content-Type: multipart/form-data", code="invalid_form")
        self.content = bytearray()
        self._name, self._whole = "", False
        self._fields: dict[str, str] = {}
        self._header, self._value, self._disposition = b"", b"", b""
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._part,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._field,
                    "on_part_data": self._data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise wrong(f"the body is no form: {error}", code="invalid_form") from None

    def read(self, piece: bytes) -> None:
        """What comes next.

        Raises:
            ApiError: it is no form, or another one.
        """
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise wrong(f"the body is no form: {error}", code="invalid_form") from None

    def taken(self) -> bytes:
        """What has come of the file since."""
        content, self.content = bytes(self.content), bytearray()
        return content

    def finished(self) -> str:
        """The file's name.

        Raises:
            ApiError: something is missing, or wrong.
        """
        if not self._whole:
            raise wrong("the body is no form: its end is missing", code="invalid_form")
        for name in ("file", "purpose"):
            if name not in self._fields:
                raise wrong(f"Missing required parameter: '{name}'", name, "missing_required_parameter")
        if self._fields["purpose"] != "batch":
            raise wrong("purpose: files are kept for 'batch' alone", "purpose", "invalid_value")
        return self._fields["file"]

    def _part(self) -> None:
        self._header, self._value, self._disposition = b"", b"", b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def _field(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = self._name = options.get(b"name", b"").decode(errors="replace")
        if name not in SCHEMA["properties"]:
            raise ApiError(400, f"Unrecognized request argument supplied: {name}", "unknown_parameter", name)
        if name in self._fields:
            raise wrong(f"{name}: is given twice", name, "invalid_value")
        if (b"filename" in options) != (name == "file"):
            raise wrong(f"{name}: is {'no' if name == 'file' else 'a'} file", name, "invalid_value")
        self._fields[name] = options[b"filename"].decode(errors="replace")[-_LONGEST_NAME:] if name == "file" else ""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.content += data[start:end]
            return
        if len(self._fields[self._name]) + end - start > _LONGEST_FIELD:
            raise wrong(f"{self._name}: is too long", self._name, "invalid_value")
        self._fields[self._name] += data[start:end].decode("latin-1")

    def _end(self) -> None:
        self._whole = True
