"""What a conversion has done so far, by whatever executed it."""

from dataclasses import dataclass, field

from quantkit.convert.journal import Entries
from quantkit.convert.worker import TaskReport
from quantkit.integrity.manifest import FileRecord
from quantkit.integrity.weighed_errors import ClassGain, WeighedCollector
from quantkit.integrity.weight_errors import RowCollector, WeightError


@dataclass(slots=True, kw_only=True)
class Execution:
    """What was done: hashes of sources and outputs by shard, errors by weight, the encoder's own CPU time.

    ``earlier_bytes``: of the source, whose output was there when this run began.
    """

    source_records: dict[str, FileRecord] = field(default_factory=dict)
    output_records: dict[str, FileRecord] = field(default_factory=dict)
    rows: RowCollector = field(default_factory=RowCollector)
    weighed: WeighedCollector = field(default_factory=WeighedCollector)
    encoded_bytes: int = 0
    encode_seconds: float = 0.0
    earlier_bytes: int = 0

    @property
    def errors(self) -> list[WeightError]:
        """Of every quantized weight, by name."""
        return self.rows.errors

    @property
    def gains(self) -> tuple[ClassGain, ...]:
        """What importance has gained, by role; empty without."""
        return self.weighed.gains(self.errors)

    def book(self, report: TaskReport) -> None:
        """A task that made INT4."""
        weight = report.task.job.weight
        assert report.error2_R is not None
        assert report.weight2_R is not None
        self.encoded_bytes += report.task.source_bytes
        self.encode_seconds += report.encode_seconds
        self.rows.add(weight.name, report.task.job.role, weight.num_rows, report.error2_R, report.weight2_R)
        if report.weighed is not None:
            self.weighed.add(weight.name, report.weighed)

    def restore(self, entries: Entries) -> None:
        """What was done before."""
        self.source_records |= {name: entry.record for name, entry in entries.sources.items()}
        self.output_records |= {name: entry.record for name, entry in entries.outputs.items()}
        for entry in entries.outputs.values():
            self.rows.restore(entry.errors)
            self.weighed.restore(entry.weighed)
