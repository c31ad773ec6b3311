"""What it costs to give memory back, and to take it again, while sequences decode on.

sizes       how large and how long everything is     running      sequences that decode on, a step at a time
guests      sequences whose memory comes and goes    breath       a pool that shrinks and grows again
breathing   the workloads of a breath, as rows       two_caches   two caches that hand one budget to and fro, as rows
"""

from typing import Final

from bench.elastic.breathing import measure as measure_breaths
from bench.elastic.breathing import num_steps as num_breaths
from bench.elastic.two_caches import measure as measure_handovers
from bench.elastic.two_caches import num_steps as num_handovers
from bench.report import Report
from bench.settings import Settings

SUITE: Final = "elastic"


def run(settings: Settings, report: Report) -> None:
    """Both workloads. Raises WrongNumbers if memory did not go where it was said to, or a row is not what was written."""
    with report.progress(SUITE, num_breaths() + num_handovers()) as begin:
        measure_breaths(settings, report, begin, suite=SUITE)
        measure_handovers(settings, report, begin, suite=SUITE)
