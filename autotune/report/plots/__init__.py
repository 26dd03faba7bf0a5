"""Figures of a run as SVG, drawn by matplotlib and coloured by the page's style sheet."""
