"""What all pages share: charts, palette, templates."""
