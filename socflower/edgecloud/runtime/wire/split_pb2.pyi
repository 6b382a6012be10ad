from collections.abc import Iterable as _Iterable
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper

DESCRIPTOR: _descriptor.FileDescriptor

class Opening(_message.Message):
    __slots__ = ("fingerprint", "joined", "num_bytes", "num_parties", "replace", "reverse", "run_id", "settings", "token_digest", "version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTIES_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    REVERSE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    version: int
    run_id: str
    token_digest: bytes
    fingerprint: str
    num_parties: int
    joined: bool
    reverse: bool
    settings: str
    num_bytes: int
    replace: bool
    def __init__(self, version: int | None = ..., run_id: str | None = ..., token_digest: bytes | None = ..., fingerprint: str | None = ..., num_parties: int | None = ..., joined: bool = ..., reverse: bool = ..., settings: str | None = ..., num_bytes: int | None = ..., replace: bool = ...) -> None: ...

class OpenPart(_message.Message):
    __slots__ = ("opening", "part")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    opening: Opening
    part: bytes
    def __init__(self, opening: Opening | _Mapping | None = ..., part: bytes | None = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("lineage",)
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    def __init__(self, lineage: str | None = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("run_id", "whole_state")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WHOLE_STATE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    whole_state: bool
    def __init__(self, run_id: str | None = ..., whole_state: bool = ...) -> None: ...

class FetchPart(_message.Message):
    __slots__ = ("batch", "num_bytes", "part")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    batch: int
    num_bytes: int
    part: bytes
    def __init__(self, batch: int | None = ..., num_bytes: int | None = ..., part: bytes | None = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("forget", "run_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    forget: bool
    def __init__(self, run_id: str | None = ..., forget: bool = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: str | None = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: str
    def __init__(self, sessions: str | None = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("credit", "hello", "part", "refusal", "welcome")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    welcome: Welcome
    refusal: Refusal
    credit: Credit
    part: Part
    def __init__(self, hello: Hello | _Mapping | None = ..., welcome: Welcome | _Mapping | None = ..., refusal: Refusal | _Mapping | None = ..., credit: Credit | _Mapping | None = ..., part: Part | _Mapping | None = ...) -> None: ...

class Barrier(_message.Message):
    __slots__ = ("batch", "lineage")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    batch: int
    def __init__(self, lineage: str | None = ..., batch: int | None = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("barriers", "credit_bytes", "fingerprint", "first_batch", "front", "incarnation", "lineage", "num_batches", "party", "received", "used", "version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PARTY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FRONT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BATCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BATCHES_FIELD_NUMBER: _ClassVar[int]
    BARRIERS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: int
    fingerprint: str
    party: int
    incarnation: str
    front: bool
    first_batch: int
    num_batches: int
    barriers: _containers.RepeatedCompositeFieldContainer[Barrier]
    lineage: str
    received: int
    used: int
    credit_bytes: int
    def __init__(self, version: int | None = ..., fingerprint: str | None = ..., party: int | None = ..., incarnation: str | None = ..., front: bool = ..., first_batch: int | None = ..., num_batches: int | None = ..., barriers: _Iterable[Barrier | _Mapping] | None = ..., lineage: str | None = ..., received: int | None = ..., used: int | None = ..., credit_bytes: int | None = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("credit_bytes", "cut", "lineage", "received", "restore_codec", "start", "used")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    RESTORE_CODEC_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    start: Barrier
    restore_codec: bool
    received: int
    used: int
    credit_bytes: int
    cut: int
    def __init__(self, lineage: str | None = ..., start: Barrier | _Mapping | None = ..., restore_codec: bool = ..., received: int | None = ..., used: int | None = ..., credit_bytes: int | None = ..., cut: int | None = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "text")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REFUSED: _ClassVar[Refusal.Code]
        START_OVER: _ClassVar[Refusal.Code]
    REFUSED: Refusal.Code
    START_OVER: Refusal.Code
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: Refusal.Code
    text: str
    def __init__(self, code: Refusal.Code | str | None = ..., text: str | None = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("received", "transfers", "used")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    received: int
    used: int
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    def __init__(self, received: int | None = ..., used: int | None = ..., transfers: _Iterable[Transfer | _Mapping] | None = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("num_bytes", "seconds")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    seconds: float
    def __init__(self, num_bytes: int | None = ..., seconds: float | None = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("body", "head", "index", "number")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    number: int
    index: int
    head: Head
    body: bytes
    def __init__(self, number: int | None = ..., index: int | None = ..., head: Head | _Mapping | None = ..., body: bytes | None = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("goodbye", "mark", "num_bytes", "recut", "tensor")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    RECUT_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    tensor: Tensor
    recut: Recut
    mark: Mark
    goodbye: Goodbye
    def __init__(self, num_bytes: int | None = ..., tensor: Tensor | _Mapping | None = ..., recut: Recut | _Mapping | None = ..., mark: Mark | _Mapping | None = ..., goodbye: Goodbye | _Mapping | None = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("answer_bits", "batch", "cut", "delta", "gradient", "ids_digest", "labels", "loss", "plain")
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BITS_FIELD_NUMBER: _ClassVar[int]
    IDS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    gradient: bool
    batch: int
    cut: int
    plain: Encoded
    loss: float
    answer_bits: int
    ids_digest: bytes
    labels: Block
    delta: Delta
    def __init__(self, gradient: bool = ..., batch: int | None = ..., cut: int | None = ..., plain: Encoded | _Mapping | None = ..., loss: float | None = ..., answer_bits: int | None = ..., ids_digest: bytes | None = ..., labels: Block | _Mapping | None = ..., delta: Delta | _Mapping | None = ...) -> None: ...

class Encoded(_message.Message):
    __slots__ = ("bits", "high", "low", "num_bytes", "shape")
    BITS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    bits: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    low: _containers.RepeatedScalarFieldContainer[float]
    high: _containers.RepeatedScalarFieldContainer[float]
    num_bytes: int
    def __init__(self, bits: int | None = ..., shape: _Iterable[int] | None = ..., low: _Iterable[float] | None = ..., high: _Iterable[float] | None = ..., num_bytes: int | None = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("by_sample", "change", "count", "digest", "first", "memory_bytes", "num_ids")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    NUM_IDS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BY_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    count: int
    digest: bytes
    first: Encoded
    change: Encoded
    num_ids: int
    memory_bytes: int
    by_sample: bool
    def __init__(self, count: int | None = ..., digest: bytes | None = ..., first: Encoded | _Mapping | None = ..., change: Encoded | _Mapping | None = ..., num_ids: int | None = ..., memory_bytes: int | None = ..., by_sample: bool = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("dtype", "name", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: str | None = ..., dtype: str | None = ..., shape: _Iterable[int] | None = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, blocks: _Iterable[Block | _Mapping] | None = ...) -> None: ...

class Recut(_message.Message):
    __slots__ = ("cut", "gives")
    CUT_FIELD_NUMBER: _ClassVar[int]
    GIVES_FIELD_NUMBER: _ClassVar[int]
    cut: int
    gives: bool
    def __init__(self, cut: int | None = ..., gives: bool = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("batch", "cut")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    batch: int
    cut: int
    def __init__(self, batch: int | None = ..., cut: int | None = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
