/** Make elements. Texts become text nodes, never HTML. */

/** Return an element with attributes, and children that are elements or texts. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

/** Return a copy of the one element in a template of the page. */
export function fromTemplate(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

export function byId(id) {
  return document.getElementById(id);
}

/** Write a number with separators, and with its noun in singular or plural if there is one. */
export function count(number, noun) {
  const digits = number.toLocaleString("en");
  return noun === undefined ? digits : `${digits} ${noun}${number === 1 ? "" : "s"}`;
}

/** Write seconds with two decimals below ten. */
export function seconds(value) {
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}
