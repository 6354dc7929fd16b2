"""Fast inference of Qwen3.5-family GGUF models with DFlash speculative decoding."""

from pydflash._abi import __version__
from pydflash.decoder import Decoder
from pydflash.devices import DeviceInfo, WorkCounters, devices, own_kernel_counts, own_kernel_rows, work_counters
from pydflash.draft_context import DraftContext, DraftContextState, DraftTree, Proposal
from pydflash.draft_feature_mirror import DraftFeatureMirror, MirrorState
from pydflash.draft_model import DraftConfig, DraftHeads, DraftModel
from pydflash.engine import Engine
from pydflash.errors import (
    BusyError,
    Cancelled,
    CapacityError,
    ChatTemplateError,
    ClosedError,
    DeviceError,
    FormatError,
    InternalError,
    InvalidArgumentError,
    ModelError,
    NotFoundError,
    OutOfMemoryError,
    PoisonedError,
    PydflashError,
    SnapshotMismatchError,
    UnsupportedModelError,
)
from pydflash.gguf_file import GgufFile, GgufTensor
from pydflash.options import CacheOptions, EngineOptions, SamplingOptions
from pydflash.prefix_cache import PrefixCache, PrefixCacheStats, PrefixLookup
from pydflash.prefix_folder import PrefixFolder
from pydflash.prefix_snapshot import PrefixSnapshot, SnapshotPart
from pydflash.prefix_store import PrefixStore, SavedPrefix
from pydflash.results import (
    DecoderStats,
    GenerationResult,
    GenerationStats,
    Progress,
    StepResult,
    StreamEvent,
    TokenLogprobs,
)
from pydflash.sequence_prefix import PrefixUse, SequencePrefix
from pydflash.session import Session
from pydflash.snapshot_info import SnapshotInfo
from pydflash.target_cache import CacheState, ForwardResult, TargetCache
from pydflash.target_cache_plan import CachePlan
from pydflash.target_model import TargetConfig, TargetModel
from pydflash.verify import Verify

__all__ = [
    "BusyError",
    "CacheOptions",
    "CachePlan",
    "CacheState",
    "Cancelled",
    "CapacityError",
    "ChatTemplateError",
    "ClosedError",
    "Decoder",
    "DecoderStats",
    "DeviceError",
    "DeviceInfo",
    "DraftConfig",
    "DraftContext",
    "DraftContextState",
    "DraftFeatureMirror",
    "DraftHeads",
    "DraftModel",
    "DraftTree",
    "Engine",
    "EngineOptions",
    "FormatError",
    "ForwardResult",
    "GenerationResult",
    "GenerationStats",
    "GgufFile",
    "GgufTensor",
    "InternalError",
    "InvalidArgumentError",
    "MirrorState",
    "ModelError",
    "NotFoundError",
    "OutOfMemoryError",
    "PoisonedError",
    "PrefixCache",
    "PrefixCacheStats",
    "PrefixFolder",
    "PrefixLookup",
    "PrefixSnapshot",
    "PrefixStore",
    "PrefixUse",
    "Progress",
    "Proposal",
    "PydflashError",
    "SamplingOptions",
    "SavedPrefix",
    "SequencePrefix",
    "Session",
    "SnapshotInfo",
    "SnapshotMismatchError",
    "SnapshotPart",
    "StepResult",
    "StreamEvent",
    "TargetCache",
    "TargetConfig",
    "TargetModel",
    "TokenLogprobs",
    "UnsupportedModelError",
    "Verify",
    "WorkCounters",
    "__version__",
    "devices",
    "own_kernel_counts",
    "own_kernel_rows",
    "work_counters",
]
