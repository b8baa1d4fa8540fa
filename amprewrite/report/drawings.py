"""All functions that draw a plan. The methods of `CastPlan` import them through this module, because drawings are an optional extra."""

from amprewrite.report.html.page import to_html, to_notebook
from amprewrite.report.pictures.other_tools import to_dot, to_model_explorer
from amprewrite.report.pictures.svg import to_png, to_svg

__all__ = ["to_dot", "to_html", "to_model_explorer", "to_notebook", "to_png", "to_svg"]
