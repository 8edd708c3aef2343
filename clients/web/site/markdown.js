import{b as a}from"./chunk-OBDOZIM3.js";import"./chunk-URF66HNK.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
