"""Report: one HTML page about one run or several.

run       what a run's folder says
content   what is shown of it
page      the HTML, with the plots that ppdist/viz draws
"""
