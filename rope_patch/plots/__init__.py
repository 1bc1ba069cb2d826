"""The pictures by which one understands position encodings.

Each is one function `plot_...` that returns a `matplotlib.figure.Figure`, beside the function that computes its
numbers. No state of pyplot is touched; `%matplotlib inline` shows the figures in a notebook, and `save` writes them.

Raises:
    MissingPackage: on import, where there is no matplotlib.
"""
# ruff: noqa: E402

from rope_patch.evaluation.figures import require_matplotlib

require_matplotlib()  # before the modules that import it, so that the message says what to install

from rope_patch.plots.biases import bias_matrices, plot_biases
from rope_patch.plots.decay_bound import decay_bounds, plot_decay_bound
from rope_patch.plots.inner_product import mean_inner_products, plot_inner_product
from rope_patch.plots.position_maps import plot_position_maps, rotated_distances
from rope_patch.plots.scores import LayerStates, MeanScores, layer_states, mean_scores, plot_scores_by_distance
from rope_patch.plots.sinusoidal import plot_sinusoidal
from rope_patch.plots.style import save
from rope_patch.plots.wavelengths import plot_wavelengths, wavelengths_of

__all__ = [
    "LayerStates",
    "MeanScores",
    "bias_matrices",
    "decay_bounds",
    "layer_states",
    "mean_inner_products",
    "mean_scores",
    "plot_biases",
    "plot_decay_bound",
    "plot_inner_product",
    "plot_position_maps",
    "plot_scores_by_distance",
    "plot_sinusoidal",
    "plot_wavelengths",
    "rotated_distances",
    "save",
    "wavelengths_of",
]
