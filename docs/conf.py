"""The site that `make docs` builds, with every warning an error."""

project = "scaled-mask-softmax"
html_title = project
html_theme = "furo"
html_show_copyright = False
extensions = ["myst_parser"]
# Links to headings, as GitHub makes them.
myst_heading_anchors = 4
