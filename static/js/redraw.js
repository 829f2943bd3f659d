/** Call `draw` after events of these kinds, at most once a frame. */
export function redrawOn(store, kinds, draw) {
  let isAsked = false;
  const ask = () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      draw();
    });
  };
  for (const kind of kinds) store.addEventListener(kind, ask);
}
