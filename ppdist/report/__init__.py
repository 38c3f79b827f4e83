"""Report: one HTML page about one run or several.

content   what is shown of runs, which ppdist.metrics.run reads
page      the HTML, with the plots that ppdist/viz draws
"""
