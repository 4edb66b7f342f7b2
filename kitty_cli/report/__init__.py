"""Reports as one HTML file: charts drawn as SVG by this code, no script, nothing fetched."""
