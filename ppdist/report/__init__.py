"""Report: one HTML page about one run or several.

run       what a run's folder says            charts    curves as SVG
content   what is shown of it                 page      the HTML
"""
