"""How large every workload is."""

from dataclasses import dataclass

from bench.serve.models import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All sizes of a run, in tokens and numbers of requests."""

    mixed: int
    """Requests."""
    mixed_lengths: tuple[int, int]
    """The shortest and the longest prompt, and answer."""
    single: tuple[int, int]
    """Tokens in and out."""
    first: int
    long: tuple[int, int, int]
    """Requests, tokens in and out."""
    shared: tuple[int, int, int, int]
    """Requests, tokens that they share, their own, and out."""
    batches: tuple[int, ...]
    """Of decode steps that are timed, and looked into."""
    context: int
    """In the middle of what is timed."""
    window: int
    """Decode steps that are timed."""
    host_batch: int
    host_contexts: tuple[int, int]
    profiled: int
    """Steps."""
    sampled: int
    """Requests of a workload whose first tokens are held against those of each alone."""
    max_num_seqs: int

    @classmethod
    def of(cls, model: ServedModel, *, small: bool) -> "Sizes":
        """Those of bench/README.md, cut to the model's reach; or `small` ones, which say only that everything works."""
        if small:
            return cls(
                mixed=10,
                mixed_lengths=(8, 40),
                single=(64, 12),
                first=700,
                long=(2, 900, 6),
                shared=(4, 1100, 16, 6),
                batches=(1, 4),
                context=64,
                window=12,
                host_batch=2,
                host_contexts=(64, 512),
                profiled=4,
                sampled=2,
                max_num_seqs=16,
            )
        return cls(
            mixed=256,
            mixed_lengths=(100, 1024),
            single=(1024, 256),
            first=min(8192, model.reach - 1),
            long=(8, min(32768, model.reach - 256), 256),
            shared=(128, 4096, 128, 64),
            batches=(1, 64, 256),
            context=1024,
            window=96,
            host_batch=16,
            host_contexts=(256, min(8192, model.reach - 96)),
            profiled=20,
            sampled=4,
            max_num_seqs=256,
        )
