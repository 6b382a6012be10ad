from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Opening(_message.Message):
    __slots__ = ("version", "run_id", "fingerprint", "num_parties", "joined", "reverse", "settings", "num_bytes", "replace")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTIES_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    REVERSE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    version: int
    run_id: str
    fingerprint: str
    num_parties: int
    joined: bool
    reverse: bool
    settings: str
    num_bytes: int
    replace: bool
    def __init__(self, version: _Optional[int] = ..., run_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., num_parties: _Optional[int] = ..., joined: bool = ..., reverse: bool = ..., settings: _Optional[str] = ..., num_bytes: _Optional[int] = ..., replace: bool = ...) -> None: ...

class OpenPart(_message.Message):
    __slots__ = ("opening", "part")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    opening: Opening
    part: bytes
    def __init__(self, opening: _Optional[_Union[Opening, _Mapping]] = ..., part: _Optional[bytes] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("run_id", "whole_state")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WHOLE_STATE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    whole_state: bool
    def __init__(self, run_id: _Optional[str] = ..., whole_state: bool = ...) -> None: ...

class FetchPart(_message.Message):
    __slots__ = ("batch", "num_bytes", "part")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    batch: int
    num_bytes: int
    part: bytes
    def __init__(self, batch: _Optional[int] = ..., num_bytes: _Optional[int] = ..., part: _Optional[bytes] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("run_id", "forget")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    forget: bool
    def __init__(self, run_id: _Optional[str] = ..., forget: bool = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: str
    def __init__(self, sessions: _Optional[str] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("hello", "welcome", "refusal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    welcome: Welcome
    refusal: Refusal
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("epoch_id", "batch")
    EPOCH_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    epoch_id: str
    batch: int
    def __init__(self, epoch_id: _Optional[str] = ..., batch: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "fingerprint", "party", "connection_id", "front", "first_batch", "num_batches", "checkpoints", "epoch_id", "received", "used", "credit_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PARTY_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_ID_FIELD_NUMBER: _ClassVar[int]
    FRONT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BATCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BATCHES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: int
    fingerprint: str
    party: int
    connection_id: str
    front: bool
    first_batch: int
    num_batches: int
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    epoch_id: str
    received: int
    used: int
    credit_bytes: int
    def __init__(self, version: _Optional[int] = ..., fingerprint: _Optional[str] = ..., party: _Optional[int] = ..., connection_id: _Optional[str] = ..., front: bool = ..., first_batch: _Optional[int] = ..., num_batches: _Optional[int] = ..., checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ..., epoch_id: _Optional[str] = ..., received: _Optional[int] = ..., used: _Optional[int] = ..., credit_bytes: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch_id", "start", "restore_codec", "received", "used", "credit_bytes", "cut")
    EPOCH_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    RESTORE_CODEC_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    epoch_id: str
    start: Checkpoint
    restore_codec: bool
    received: int
    used: int
    credit_bytes: int
    cut: int
    def __init__(self, epoch_id: _Optional[str] = ..., start: _Optional[_Union[Checkpoint, _Mapping]] = ..., restore_codec: bool = ..., received: _Optional[int] = ..., used: _Optional[int] = ..., credit_bytes: _Optional[int] = ..., cut: _Optional[int] = ...) -> None: ...

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
    def __init__(self, code: _Optional[_Union[Refusal.Code, str]] = ..., text: _Optional[str] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("tensor", "recut", "mark", "goodbye")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    RECUT_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    tensor: Tensor
    recut: Recut
    mark: Mark
    goodbye: Goodbye
    def __init__(self, tensor: _Optional[_Union[Tensor, _Mapping]] = ..., recut: _Optional[_Union[Recut, _Mapping]] = ..., mark: _Optional[_Union[Mark, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("gradient", "batch", "cut", "plain", "loss", "answer_bits", "ids_digest", "labels", "delta", "labels_form")
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BITS_FIELD_NUMBER: _ClassVar[int]
    IDS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    LABELS_FORM_FIELD_NUMBER: _ClassVar[int]
    gradient: bool
    batch: int
    cut: int
    plain: Encoded
    loss: float
    answer_bits: int
    ids_digest: bytes
    labels: _containers.RepeatedCompositeFieldContainer[Block]
    delta: Delta
    labels_form: str
    def __init__(self, gradient: bool = ..., batch: _Optional[int] = ..., cut: _Optional[int] = ..., plain: _Optional[_Union[Encoded, _Mapping]] = ..., loss: _Optional[float] = ..., answer_bits: _Optional[int] = ..., ids_digest: _Optional[bytes] = ..., labels: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., labels_form: _Optional[str] = ...) -> None: ...

class Encoded(_message.Message):
    __slots__ = ("bits", "shape", "low", "high", "num_bytes")
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
    def __init__(self, bits: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., low: _Optional[_Iterable[float]] = ..., high: _Optional[_Iterable[float]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("count", "digest", "first", "change", "num_ids", "memory_bytes", "by_sample")
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
    def __init__(self, count: _Optional[int] = ..., digest: _Optional[bytes] = ..., first: _Optional[_Union[Encoded, _Mapping]] = ..., change: _Optional[_Union[Encoded, _Mapping]] = ..., num_ids: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., by_sample: bool = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("dtype", "shape")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Recut(_message.Message):
    __slots__ = ("cut", "gives")
    CUT_FIELD_NUMBER: _ClassVar[int]
    GIVES_FIELD_NUMBER: _ClassVar[int]
    cut: int
    gives: bool
    def __init__(self, cut: _Optional[int] = ..., gives: bool = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("batch", "cut")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    batch: int
    cut: int
    def __init__(self, batch: _Optional[int] = ..., cut: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
