"""Report: one HTML page about one run.

content   what is shown of the run, which ppdist.metrics.run reads
page      the HTML, with the plots that ppdist/viz draws
"""
