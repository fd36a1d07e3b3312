"""What all pages share: plotly figures, one palette, templates."""
