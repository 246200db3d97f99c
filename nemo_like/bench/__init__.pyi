from nemo_like.bench.options import BenchOptions as BenchOptions
from nemo_like.bench.side_by_side import Comparison as Comparison
from nemo_like.bench.side_by_side import compare_modes as compare_modes
