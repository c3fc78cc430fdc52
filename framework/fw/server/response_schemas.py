"""The Responses interface as the OpenAPI document has it (https://platform.openai.com/docs/api-reference/responses).

A text in the place of a list is the list that it stands for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from fw.server.file_schemas import Metadata
from fw.server.schemas import (
    Bias,
    Body,
    Count,
    Int64,
    No,
    Nothing,
    NotObfuscated,
    OfAStream,
    Penalty,
    Program,
    ServiceTier,
    Several,
    Share,
    Some,
    Stop,
    TokenId,
)
from fw.server.tool_calls import MOST_TOOLS

ItemStatus = Literal["in_progress", "completed", "incomplete"]
_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class InputText(Body):
    type: Literal["input_text"]
    text: str


class OutputText(Body):
    """Of an answer that is given back; no more than its text is read."""

    type: Literal["output_text"]
    text: str
    annotations: Several[Any] | None = None
    logprobs: Several[Any] | None = None


class Refusal(Body):
    type: Literal["refusal"]
    refusal: str


_Part = Annotated[InputText | OutputText | Refusal, Field(discriminator="type")]


def _parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Content = Annotated[Several[_Part], BeforeValidator(_parts, json_schema_input_type=str | list[_Part])]


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: ItemStatus | None = None


class FunctionCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: _Name
    arguments: str
    id: str | None = None
    status: ItemStatus | None = None


class FunctionCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: ItemStatus | None = None


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "message" if kind is None else kind if isinstance(kind, str) else None


_Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="an item is a message, a function_call or a function_call_output; nothing else is known here",
    ),
]
_Items = Some[_Item]


def _message(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Input = Annotated[_Items, BeforeValidator(_message, json_schema_input_type=str | _Items)]


class TextForm(Body):
    type: Literal["text"]


class JsonForm(Body):
    type: Literal["json_object"]


class SchemaForm(Body):
    type: Literal["json_schema"]
    name: _Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: Annotated[TextForm | JsonForm | SchemaForm, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(Body):
    type: Literal["function"]
    name: _Name


class Reasoning(Body):
    effort: str | None = None
    summary: None = None


class ResponseStreamOptions(Body):
    include_obfuscation: NotObfuscated = None


class ResponseRequest(Body):
    """``POST /v1/responses``. What OpenAI's interface does not have goes by the names that chat completions have for it."""

    model: str | None = None
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=(1 << 31) - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    stream: bool | None = None
    stream_options: Annotated[ResponseStreamOptions | None, OfAStream] = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    include: Several[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: ServiceTier | None = None
    store: No = None
    background: No = None
    previous_response_id: Nothing = None
    conversation: Nothing = None
    stop: Stop | None = None
    seed: Int64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    top_k: Annotated[int, Field(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Several[TokenId] | None = None
    skip_special_tokens: bool | None = None
    regex: Program | None = None
    grammar: Program | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class SaidText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]]


class SaidMessage(BaseModel):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[SaidText]


class MadeCall(BaseModel):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class WhyIncomplete(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class ResponseBody(BaseModel):
    """A response; ``failed`` and ``in_progress`` are told by events alone."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    error: ResponseError | None
    incomplete_details: WhyIncomplete | None
    model: str
    output: list[SaidMessage | MadeCall]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: TextOptions
    tools: list[FunctionTool]
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool
    parallel_tool_calls: bool
    reasoning: Reasoning
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
