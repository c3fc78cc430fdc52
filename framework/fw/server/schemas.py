"""Bodies of requests and answers, as the OpenAPI document has them (https://platform.openai.com/docs/api-reference).

Values are taken as they are: no text for a number. A field that is not known is refused, as OpenAI does it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from fw.server.tool_calls import MOST_TOOLS

_T = TypeVar("_T")
Several = Annotated[list[_T], Field(fail_fast=True)]
"""A list, of whose wrong items one is told: one error for each could be thousands of times as large as a body."""
Some = Annotated[list[_T], Field(fail_fast=True, min_length=1)]

Int64 = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
_Text = Annotated[str, Field(min_length=1)]
Texts = _Text | Some[_Text] | Some[TokenId] | Some[Some[TokenId]]
Bias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(fail_fast=True)]
Stop = str | Annotated[list[str], Field(fail_fast=True, max_length=64)]
Program = Annotated[str, Field(max_length=100_000)]
"""That says what an answer looks like."""


def _stored(value: Any) -> Any:
    if value is not None and value is not False:
        raise PydanticCustomError("not_stored", "responses are not stored here, nor made in the background; leave it out")
    return value


No = Annotated[Literal[False] | None, BeforeValidator(_stored)]
Nothing = Annotated[None, BeforeValidator(_stored)]


def _a_bool(value: Any) -> Any:
    if value is not None and not isinstance(value, bool):  # 0 equals False, and a literal is compared
        raise PydanticCustomError("bool_type", "Input should be a valid boolean")
    return value


NotObfuscated = Annotated[Literal[False] | None, BeforeValidator(_a_bool)]


def _of_a_stream(value: _T, info: ValidationInfo) -> _T:
    if value is not None and not info.data.get("stream"):
        raise PydanticCustomError("not_streamed", "The 'stream_options' parameter is only allowed when 'stream' is enabled")
    return value


OfAStream = AfterValidator(_of_a_stream)
"""Of a field below ``stream``."""


class Body(BaseModel):
    """Of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Open(BaseModel):
    """Likewise; what is not known is handed on."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


ServiceTier = Literal["auto", "default"]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: NotObfuscated = None


class JsonSchemaForm(Open):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaForm | None = None


class Choosing(Body):
    """How tokens are chosen, and when an answer ends; OpenAI's, and others by the names that vLLM has for them."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | None = None
    seed: Int64 | None = None
    max_tokens: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, OfAStream] = None
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(fail_fast=True)] | None = None
    service_tier: ServiceTier | None = None
    response_format: ResponseFormat | None = None
    top_k: Annotated[int, Field(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Several[TokenId] | None = None
    skip_special_tokens: bool | None = None
    json_schema: dict[str, Any] | None = None
    regex: Program | None = None
    grammar: Program | None = None


class CompletionRequest(Choosing):
    """``POST /v1/completions``."""

    prompt: Texts
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: Literal[""] | None = None


class Function(Open):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class Message(Open):
    """Of a conversation; whatever else a chat template reads may be in it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[ContentPart] | None = None
    name: str | None = None
    tool_calls: Several[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ContentPart(Open):
    type: Literal["text"]
    text: str


class ChatRequest(Choosing):
    """``POST /v1/chat/completions``."""

    messages: Some[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Several[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    store: No = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class EmbeddingRequest(Body):
    """``POST /v1/embeddings``."""

    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: dict[str, int]


class TokenizeRequest(Body):
    """``POST /tokenize``: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Some[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Several[TokenId]


class DetokenizeResponse(BaseModel):
    prompt: str


class LoadAdapterRequest(Body):
    """``POST /v1/load_lora_adapter``."""

    lora_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class DropAdapterRequest(Body):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: str | None = None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Of whatever goes wrong."""

    error: ErrorDetail


class Condition(BaseModel):
    status: str


class Version(BaseModel):
    version: str
