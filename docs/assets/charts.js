// Draws the charts of a report, of which `reportCharts` holds the specifications, in the colours of the theme.
"use strict";
const dark = () => document.body.dataset.mdColorScheme === "slate";
const draw = place => vegaEmbed(place, reportCharts.specs[place.dataset.spec], {
  actions: false, renderer: "svg", config: dark() ? reportCharts.dark : reportCharts.light, tooltip: {theme: dark() ? "dark" : "light"},
}).then(() => { place.dataset.drawn = "yes"; });
const watch = new IntersectionObserver(entries => entries.filter(entry => entry.isIntersecting).forEach(entry => {
  watch.unobserve(entry.target);
  draw(entry.target);
}), {rootMargin: "600px"});
document.querySelectorAll(".chart").forEach(place => watch.observe(place));
new MutationObserver(() => document.querySelectorAll(".chart[data-drawn]").forEach(draw))
  .observe(document.body, {attributeFilter: ["data-md-color-scheme"]});
